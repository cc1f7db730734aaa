//! Compiled images on disk.
//!
//! A file is named by the hash of everything that the image depends on, so it is never changed, only
//! made. It is written under a name of its own and then renamed, so that another process, also one
//! on another host of a shared file system, sees a whole file or none; two that make the same file
//! replace it by an equal one. A file that was cut short or changed does not match its checksum and
//! counts as missing. Nothing here is an error: without a disk the image is compiled again.

use std::{
    fs, io,
    io::Write,
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
};

use sha2::{Digest, Sha256};

/// First bytes of a file; the digit is the version of the format. The checksum of the rest follows.
const MAGIC: &[u8] = b"deep-ep kernel 1\n";
const CHECKSUM: usize = 32;
/// How files end.
const EXTENSION: &str = "kernel";

/// The hash that names a file.
pub(crate) type Name = [u8; 32];

/// A folder of images, or none.
#[derive(Debug, Clone)]
pub(crate) struct Disk {
    folder: Option<PathBuf>,
}

/// What is in the folder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Use {
    pub(crate) files: usize,
    pub(crate) bytes: u64,
}

impl Disk {
    pub(crate) fn new(folder: Option<PathBuf>) -> Self {
        Self { folder }
    }

    /// The image of this name, if there is a whole one.
    pub(crate) fn load(&self, name: &Name) -> Option<Vec<u8>> {
        let path = self.path(name)?;
        let file = fs::read(&path).ok()?;
        let rest = file.strip_prefix(MAGIC);
        let image = rest.and_then(|rest| {
            let (checksum, image) = rest.split_at_checked(CHECKSUM)?;
            (Sha256::digest(image).as_slice() == checksum).then_some(image)
        });
        if image.is_none() {
            tracing::warn!(path = %path.display(), "a cached kernel is damaged; compiling it again");
        }
        image.map(<[u8]>::to_vec)
    }

    /// Keeps an image, if that is possible.
    pub(crate) fn store(&self, name: &Name, image: &[u8]) {
        let Some(path) = self.path(name) else {
            return;
        };
        if let Err(error) = write(&path, image) {
            tracing::debug!(path = %path.display(), %error, "a kernel is kept in memory only");
        }
    }

    fn path(&self, name: &Name) -> Option<PathBuf> {
        let folder = self.folder.as_ref()?;
        Some(folder.join(format!("{}.{EXTENSION}", hex(name))))
    }

    /// What is in the folder now.
    pub(crate) fn usage(&self) -> Use {
        let entries = self
            .folder
            .iter()
            .flat_map(fs::read_dir)
            .flatten()
            .flatten();
        let sizes = entries
            .filter(|entry| entry.path().extension().is_some_and(|e| e == EXTENSION))
            .filter_map(|entry| entry.metadata().ok())
            .map(|metadata| metadata.len());
        sizes.fold(Use { files: 0, bytes: 0 }, |sum, size| Use {
            files: sum.files + 1,
            bytes: sum.bytes + size,
        })
    }

    /// Whether files can be made: the folder, or the nearest one above that exists, is writable.
    pub(crate) fn writable(&self) -> bool {
        let Some(folder) = &self.folder else {
            return false;
        };
        let existing = folder.ancestors().find(|folder| folder.exists());
        existing.is_some_and(|folder| {
            folder.is_dir() && rustix::fs::access(folder, rustix::fs::Access::WRITE_OK).is_ok()
        })
    }
}

fn write(path: &Path, image: &[u8]) -> io::Result<()> {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let folder = path.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(folder)?;
    // Process ids repeat between hosts and containers, so there is chance in the name too.
    let mut chance = [0u8; 8];
    getrandom::fill(&mut chance).map_err(io::Error::other)?;
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    let own = folder.join(format!(
        ".{}-{count}-{}.tmp",
        std::process::id(),
        hex(&chance)
    ));
    let mut file = fs::File::create_new(&own)?;
    let written = file
        .write_all(MAGIC)
        .and_then(|()| file.write_all(&Sha256::digest(image)))
        .and_then(|()| file.write_all(image))
        .and_then(|()| {
            drop(file);
            fs::rename(&own, path)
        });
    if written.is_err() {
        let _ = fs::remove_file(&own);
    }
    written
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use std::{os::unix::fs::PermissionsExt, process::Command};

    use super::*;
    use crate::engine::cuda::jit::test_folder::TestFolder;

    const NAME: Name = [7; 32];

    #[test]
    fn an_image_comes_back_as_it_was() {
        let folder = TestFolder::new("round");
        let disk = Disk::new(Some(folder.join("made/when/needed")));
        assert_eq!(disk.load(&NAME), None);
        disk.store(&NAME, b"image");
        assert_eq!(disk.load(&NAME).as_deref(), Some(&b"image"[..]));
        assert_eq!(disk.load(&[8; 32]), None);
        assert_eq!(disk.usage().files, 1);
        assert!(disk.writable());
    }

    #[test]
    fn a_damaged_file_counts_as_missing_and_is_replaced() {
        let folder = TestFolder::new("damaged");
        let disk = Disk::new(Some(folder.to_path_buf()));
        disk.store(&NAME, b"image of some length");
        let path = disk.path(&NAME).unwrap();
        let good = fs::read(&path).unwrap();
        for length in 0..good.len() {
            fs::write(&path, &good[..length]).unwrap();
            assert_eq!(disk.load(&NAME), None, "cut to {length} bytes");
        }
        for at in 0..good.len() {
            let mut bad = good.clone();
            bad[at] ^= 1;
            fs::write(&path, &bad).unwrap();
            assert_eq!(disk.load(&NAME), None, "byte {at} changed");
        }
        disk.store(&NAME, b"image of some length");
        assert_eq!(fs::read(&path).unwrap(), good);
    }

    #[test]
    fn without_a_usable_folder_nothing_is_kept_and_nothing_fails() {
        let folder = TestFolder::new("unusable");
        let file = folder.join("file");
        fs::write(&file, "").unwrap();
        let unusable = [
            None,
            Some(file.join("below")),
            Some(PathBuf::from("/proc/self/nowhere")),
        ];
        for folder in unusable {
            let disk = Disk::new(folder);
            disk.store(&NAME, b"image");
            assert_eq!(disk.load(&NAME), None);
            assert!(!disk.writable(), "{disk:?}");
        }
    }

    #[test]
    fn a_read_only_folder_is_read() {
        let folder = TestFolder::new("read-only");
        let disk = Disk::new(Some(folder.to_path_buf()));
        disk.store(&NAME, b"image");
        fs::set_permissions(&*folder, fs::Permissions::from_mode(0o555)).unwrap();
        // Root may write anywhere; for it this is the same as a writable folder.
        disk.store(&[9; 32], b"another");
        assert_eq!(disk.load(&NAME).as_deref(), Some(&b"image"[..]));
        assert_eq!(disk.load(&[9; 32]).is_some(), disk.writable());
        fs::set_permissions(&*folder, fs::Permissions::from_mode(0o755)).unwrap();
    }

    /// Runs itself in two more processes, which store different images under one name, and checks
    /// that every load sees one of them whole.
    #[test]
    fn processes_that_race_see_whole_files() {
        const VARIABLE: &str = "DEEP_EP_TEST_CACHE_RACE";
        let images = [vec![1u8; 100_000], vec![2u8; 50_000]];
        if let Some(folder) = std::env::var_os(VARIABLE) {
            let disk = Disk::new(Some(folder.into()));
            for turn in 0..200 {
                disk.store(&NAME, &images[(std::process::id() as usize + turn) % 2]);
                let seen = disk.load(&NAME).expect("a file that is there stays");
                assert!(images.contains(&seen));
            }
            return;
        }
        let folder = TestFolder::new("race");
        let children: Vec<_> = (0..2)
            .map(|_| {
                let name = std::thread::current().name().unwrap().to_owned();
                Command::new(std::env::current_exe().unwrap())
                    .args(["--exact", &name, "--test-threads", "1"])
                    .env(VARIABLE, &*folder)
                    .stdout(std::process::Stdio::null())
                    .spawn()
                    .unwrap()
            })
            .collect();
        for mut child in children {
            assert!(child.wait().unwrap().success());
        }
        let left: Vec<_> = fs::read_dir(&*folder).unwrap().flatten().collect();
        assert_eq!(left.len(), 1, "temporary files are left: {left:?}");
    }
}
