//! The slow, obvious definition of dispatch and combine.
