//! A folder for one test.

use std::{
    fs,
    ops::Deref,
    path::{Path, PathBuf},
};

/// A new folder, removed when the test is over.
pub(crate) struct TestFolder(PathBuf);

impl TestFolder {
    pub(crate) fn new(test: &str) -> Self {
        let name = format!("deep-ep-test-{}-{test}", std::process::id());
        let path = std::env::temp_dir().join(name);
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }
}

impl Deref for TestFolder {
    type Target = Path;

    fn deref(&self) -> &Path {
        &self.0
    }
}

impl Drop for TestFolder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}
