//! Where NVRTC may be.

use std::{
    ffi::OsString,
    fs,
    path::{Path, PathBuf},
};

/// A library that was tried.
#[derive(Debug, Clone)]
pub(crate) struct Attempt {
    /// Which kind of place it is in, as `toolkit`.
    pub(crate) place: &'static str,
    /// The file, or the name that the loader was asked for.
    pub(crate) candidate: PathBuf,
    /// Why it is not used; `None` if it is.
    pub(crate) refused: Option<String>,
}

/// What the search starts from.
#[derive(Debug, Clone, Default)]
pub(crate) struct Places {
    /// `DEEP_EP_NVRTC`: a file or a folder. If it is set, nothing else is tried.
    pub(crate) setting: Option<PathBuf>,
    /// Libraries that are in this process already.
    pub(crate) loaded: Vec<PathBuf>,
    /// Folders of Python packages.
    pub(crate) packages: Vec<PathBuf>,
    /// Folders of CUDA toolkits.
    pub(crate) toolkits: Vec<PathBuf>,
    /// Whether the loader is asked by name at last.
    pub(crate) loader: bool,
}

impl Places {
    /// The places of this process. No program is run to find them.
    pub(crate) fn of_process(setting: Option<PathBuf>) -> Self {
        let variable = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
        Self {
            setting,
            loaded: loaded(&fs::read_to_string("/proc/self/maps").unwrap_or_default()),
            packages: packages(variable),
            toolkits: ["CUDA_HOME", "CUDA_PATH"]
                .into_iter()
                .filter_map(variable)
                .map(PathBuf::from)
                .chain([PathBuf::from("/usr/local/cuda")])
                .collect(),
            loader: true,
        }
    }

    /// What to try, in this order.
    pub(crate) fn candidates(&self) -> Vec<(&'static str, PathBuf)> {
        if let Some(setting) = &self.setting {
            let in_folder = libraries(setting);
            let files = match setting.is_dir() && !in_folder.is_empty() {
                true => in_folder,
                false => vec![setting.clone()],
            };
            return files.into_iter().map(|f| ("DEEP_EP_NVRTC", f)).collect();
        }
        let mut all: Vec<(&'static str, PathBuf)> = Vec::new();
        let mut add = |place, file: PathBuf| {
            if !all.iter().any(|(_, other)| *other == file) {
                all.push((place, file));
            }
        };
        for file in &self.loaded {
            add("already loaded", file.clone());
        }
        for package in &self.packages {
            let nvidia = package.join("nvidia");
            // `cu13` before `cu12`; the packages for CUDA 12 use one folder per library.
            let mut folders = matching(&nvidia, |name| name.starts_with("cu"));
            folders.sort_by_key(|folder| std::cmp::Reverse(number(folder)));
            for folder in folders {
                for file in libraries(&folder.join("lib")) {
                    add("Python package", file);
                }
            }
        }
        for toolkit in &self.toolkits {
            for folder in [
                "lib64",
                "targets/x86_64-linux/lib",
                "targets/sbsa-linux/lib",
            ] {
                for file in libraries(&toolkit.join(folder)) {
                    add("toolkit", file);
                }
            }
        }
        if self.loader {
            for name in ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"] {
                add("loader path", name.into());
            }
        }
        all
    }
}

/// The builtins library that belongs to an NVRTC file: it lies beside it, or beside the file that a
/// link leads to.
pub(crate) fn builtins_beside(nvrtc: &Path) -> Option<PathBuf> {
    let here = nvrtc.parent().filter(|folder| folder.is_dir());
    let target = fs::canonicalize(nvrtc).ok();
    let there = target.as_deref().and_then(Path::parent);
    let folders = [here, there].into_iter().flatten();
    folders
        .filter(|folder| !folder.as_os_str().is_empty())
        .find_map(|folder| {
            let mut files = matching(folder, |name| {
                name.starts_with("libnvrtc-builtins.so.") && !name.contains(".alt.")
            });
            files.sort();
            files.pop()
        })
}

/// NVRTC files of a folder, the newest name first.
fn libraries(folder: &Path) -> Vec<PathBuf> {
    let mut files = matching(folder, is_nvrtc);
    // `libnvrtc.so.13` before `libnvrtc.so`, which is for linking and may be anything.
    files.sort_by(|a, b| b.cmp(a));
    files
}

fn is_nvrtc(name: &str) -> bool {
    name == "libnvrtc.so" || name.starts_with("libnvrtc.so.")
}

/// Entries of a folder by name; none if it cannot be read.
fn matching(folder: &Path, wanted: impl Fn(&str) -> bool) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut found: Vec<_> = entries
        .filter(|entry| entry.file_name().to_str().is_some_and(&wanted))
        .map(|entry| entry.path())
        .collect();
    found.sort();
    found
}

/// The number at the end of `cu13`; 0 for `cuda_nvrtc`.
fn number(folder: &Path) -> u32 {
    let name = folder.file_name().unwrap_or_default().to_string_lossy();
    let digits = name.trim_start_matches(|c: char| !c.is_ascii_digit());
    digits.parse().unwrap_or(0)
}

/// NVRTC files among the mappings of a process (`proc(5)`: the path is the sixth field).
fn loaded(maps: &str) -> Vec<PathBuf> {
    let mut files: Vec<PathBuf> = Vec::new();
    for line in maps.lines() {
        let Some(start) = line.find('/') else {
            continue;
        };
        let file = PathBuf::from(&line[start..]);
        let named = file
            .file_name()
            .and_then(|name| name.to_str())
            .is_some_and(is_nvrtc);
        if named && !files.contains(&file) {
            files.push(file);
        }
    }
    files
}

/// Package folders of the Python environments that this process would use, best first.
fn packages(variable: impl Fn(&str) -> Option<OsString>) -> Vec<PathBuf> {
    let mut prefixes: Vec<PathBuf> = ["VIRTUAL_ENV", "CONDA_PREFIX"]
        .into_iter()
        .filter_map(&variable)
        .map(PathBuf::from)
        .collect();
    if let Some(path) = variable("PATH") {
        for bin in std::env::split_paths(&path) {
            if !["python3", "python"]
                .iter()
                .any(|name| bin.join(name).exists())
            {
                continue;
            }
            let Some(prefix) = bin.parent() else {
                continue;
            };
            if bin.ends_with("shims") {
                // pyenv: the scripts in `shims` start one of these.
                prefixes.extend(matching(&prefix.join("versions"), |_| true));
            }
            prefixes.push(prefix.to_owned());
            if prefix == Path::new("/usr") {
                // Where pip installs for a distribution's Python.
                prefixes.push("/usr/local".into());
            }
        }
    }
    prefixes.extend(variable("HOME").map(|home| Path::new(&home).join(".local")));
    let mut folders: Vec<PathBuf> = Vec::new();
    if let Some(path) = variable("PYTHONPATH") {
        folders.extend(std::env::split_paths(&path));
    }
    for prefix in prefixes {
        for library in ["lib", "lib64"] {
            for python in matching(&prefix.join(library), |name| name.starts_with("python3")) {
                folders.push(python.join("site-packages"));
                folders.push(python.join("dist-packages"));
            }
        }
    }
    let mut seen = Vec::new();
    folders.retain(|folder| {
        let new = folder.is_dir() && !seen.contains(folder);
        if new {
            seen.push(folder.clone());
        }
        new
    });
    folders
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::cuda::jit::test_folder::TestFolder;

    fn touch(path: &Path) {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, "").unwrap();
    }

    #[test]
    fn a_setting_is_the_only_place() {
        let folder = TestFolder::new("setting");
        touch(&folder.join("libnvrtc.so.13"));
        touch(&folder.join("libnvrtc-builtins.so.13.0"));
        touch(&folder.join("libnvrtc.alt.so.13"));
        let mut places = Places {
            setting: Some(folder.to_path_buf()),
            loader: true,
            ..Places::default()
        };
        let file = folder.join("libnvrtc.so.13");
        assert_eq!(places.candidates(), [("DEEP_EP_NVRTC", file.clone())]);
        places.setting = Some(file.clone());
        assert_eq!(places.candidates(), [("DEEP_EP_NVRTC", file.clone())]);
        let builtins = folder.join("libnvrtc-builtins.so.13.0");
        assert_eq!(builtins_beside(&file), Some(builtins));
    }

    #[test]
    fn packages_come_before_toolkits_and_the_newest_first() {
        let folder = TestFolder::new("packages");
        let site = folder.join("venv/lib/python3.12/site-packages");
        let new = site.join("nvidia/cu13/lib/libnvrtc.so.13");
        let old = site.join("nvidia/cuda_nvrtc/lib/libnvrtc.so.12");
        let toolkit = folder.join("cuda/lib64/libnvrtc.so.12");
        for file in [&new, &old, &toolkit] {
            touch(file);
        }
        let places = Places {
            packages: packages(|name| {
                (name == "VIRTUAL_ENV").then(|| folder.join("venv").into_os_string())
            }),
            toolkits: vec![folder.join("cuda")],
            ..Places::default()
        };
        assert_eq!(
            places.candidates(),
            [
                ("Python package", new),
                ("Python package", old),
                ("toolkit", toolkit)
            ]
        );
    }

    #[test]
    fn a_python_on_the_path_is_not_run() {
        let folder = TestFolder::new("path");
        touch(&folder.join("shims/python3"));
        touch(&folder.join("versions/3.11/lib/python3.11/site-packages/x"));
        let found =
            packages(|name| (name == "PATH").then(|| folder.join("shims").into_os_string()));
        assert_eq!(
            found,
            [folder.join("versions/3.11/lib/python3.11/site-packages")]
        );
    }

    #[test]
    fn libraries_of_the_process_are_seen() {
        let maps = "\
7f00-7f01 r-xp 00000000 08:01 1 /opt/a b/libnvrtc.so.12
7f01-7f02 r--p 00001000 08:01 1 /opt/a b/libnvrtc.so.12
7f02-7f03 r--p 00000000 08:01 2 /opt/libnvrtc-builtins.so.12.8
7f03-7f04 rw-p 00000000 00:00 0
";
        assert_eq!(loaded(maps), [PathBuf::from("/opt/a b/libnvrtc.so.12")]);
    }
}
