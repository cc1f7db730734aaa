//! Gives the shared library its SONAME: the name that programs look for when they start.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    // Before 1.0 every minor version may change the interface, so it is part of the name.
    let [major, minor] = ["MAJOR", "MINOR"]
        .map(|part| std::env::var(format!("CARGO_PKG_VERSION_{part}")).unwrap_or_default());
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libdeep_ep.so.{major}.{minor}");
}
