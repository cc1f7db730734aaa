//! The secret of a job on one host, where nobody set one.
//!
//! Rank 0 makes up 32 random bytes and leaves them, as hexadecimal digits, in a file that only
//! its user can read; the other ranks are of the same user. The folder is `deep-ep` in
//! `XDG_RUNTIME_DIR`, or `/tmp/deep-ep-<uid>`; it must be a real folder of this user that nobody
//! else may enter. The name has the port, and the network namespace, in which a port is unique:
//! rank 0 writes the file after it has got the port, so only one job writes it at a time.
//!
//! A file of an earlier job that was killed is replaced by renaming the new one over it. A rank
//! that read the old one is refused and reads again.

use std::{
    fs::{self, DirBuilder, File, OpenOptions},
    io::{self, Read, Write},
    os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
};

use rustix::{fs::OFlags, process::geteuid};

use super::auth::nonce;
use crate::{
    error::{Error, Result},
    settings::Secret,
};

/// Hexadecimal digits of 32 bytes.
const DIGITS: usize = 64;

/// Rank 0's file, removed when this is dropped.
pub(super) struct SecretFile {
    path: PathBuf,
    secret: Secret,
}

impl SecretFile {
    /// Makes up a secret and leaves it for the ranks that will come to `port`.
    pub(super) fn create(port: u16) -> Result<Self> {
        let folder = folder();
        let failed = |what: &str, path: &Path, error| {
            Error::io(
                format!(
                    "{what} {} for the job's secret (set DEEP_EP_SECRET to do without it)",
                    path.display()
                ),
                error,
            )
        };
        match DirBuilder::new().mode(0o700).create(&folder) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                return Err(failed("creating the folder", &folder, error));
            }
            _ => check_folder(&folder).map_err(|e| failed("using the folder", &folder, e))?,
        }
        let path = folder.join(name(port));
        let text = random_hex().map_err(|e| failed("writing", &path, e))?;
        let secret = Secret::new(text.as_bytes())?;
        write_renamed(&path, &text).map_err(|e| failed("writing", &path, e))?;
        Ok(Self { path, secret })
    }

    pub(super) fn secret(&self) -> &Secret {
        &self.secret
    }
}

impl Drop for SecretFile {
    fn drop(&mut self) {
        // Not if someone else's is there by now.
        if read_file(&self.path).is_ok_and(|secret| secret == self.secret) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Reads the secret that rank 0 left for `port`; it may not be there yet, or be an old one.
pub(super) fn read(port: u16) -> io::Result<Secret> {
    let folder = folder();
    check_folder(&folder)?;
    read_file(&folder.join(name(port)))
}

fn folder() -> PathBuf {
    match std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from) {
        // Often set, but not there, in containers and after `su`.
        Some(base) if base.is_absolute() && base.is_dir() => base.join("deep-ep"),
        _ => PathBuf::from(format!("/tmp/deep-ep-{}", geteuid().as_raw())),
    }
}

fn name(port: u16) -> String {
    let namespace = fs::metadata("/proc/self/ns/net").map_or(0, |meta| meta.ino());
    format!("secret-{port}-{namespace}")
}

/// Others must not be able to put a file into the folder, or to lead it elsewhere.
fn check_folder(folder: &Path) -> io::Result<()> {
    let meta = fs::symlink_metadata(folder)?;
    if !meta.is_dir() || meta.uid() != geteuid().as_raw() || meta.mode() & 0o077 != 0 {
        return Err(io::Error::other(
            "it must be a folder of this user with mode 0700",
        ));
    }
    Ok(())
}

fn random_hex() -> io::Result<String> {
    Ok(nonce()?.iter().map(|byte| format!("{byte:02x}")).collect())
}

fn write_renamed(path: &Path, text: &str) -> io::Result<()> {
    let unique = &random_hex()?[..16];
    let temporary = path.with_file_name(format!(".new-{unique}"));
    let written = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&temporary)
        .and_then(|mut file| file.write_all(text.as_bytes()))
        .and_then(|()| fs::rename(&temporary, path));
    if written.is_err() {
        let _ = fs::remove_file(&temporary);
    }
    written
}

fn read_file(path: &Path) -> io::Result<Secret> {
    // Not blocking, should it be a pipe; it is checked after it was opened, so it stays the same.
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let file: File = OpenOptions::new()
        .read(true)
        .custom_flags(flags.bits() as i32)
        .open(path)?;
    let meta = file.metadata()?;
    if !meta.is_file() || meta.uid() != geteuid().as_raw() || meta.mode() & 0o077 != 0 {
        return Err(io::Error::other(format!(
            "{} must be a file of this user with mode 0600",
            path.display()
        )));
    }
    let mut text = Vec::new();
    file.take(DIGITS as u64 + 1).read_to_end(&mut text)?;
    if text.len() != DIGITS {
        return Err(io::Error::other(format!(
            "{} does not hold a secret",
            path.display()
        )));
    }
    Secret::new(text).map_err(io::Error::other)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    // Ports below 1024, which the other tests never use.

    #[test]
    fn a_secret_can_be_read_back_replaces_a_stale_one_and_goes_away() {
        let old = SecretFile::create(7).unwrap();
        let new = SecretFile::create(7).unwrap();
        assert!(old.secret != new.secret);
        let path = new.path.clone();
        assert_eq!(
            fs::metadata(&path).unwrap().permissions().mode() & 0o777,
            0o600
        );
        drop(old);
        assert!(
            read(7).unwrap() == new.secret,
            "an old owner leaves the new file alone"
        );
        drop(new);
        assert!(!path.exists());
    }

    #[test]
    fn files_that_others_could_have_made_are_not_read() {
        let file = SecretFile::create(8).unwrap();
        fs::set_permissions(&file.path, fs::Permissions::from_mode(0o644)).unwrap();
        assert!(read(8).is_err());
        fs::set_permissions(&file.path, fs::Permissions::from_mode(0o600)).unwrap();
        let link = file.path.with_file_name(name(9));
        let _ = fs::remove_file(&link);
        symlink(&file.path, &link).unwrap();
        assert!(read(9).is_err());
        fs::remove_file(&link).unwrap();
        fs::write(&file.path, "short").unwrap();
        assert!(read(8).is_err());
        fs::remove_file(&file.path).unwrap();
    }
}
