//! The `deep-ep` command.
fn main() {}
