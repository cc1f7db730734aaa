//! What memory the machine has and what this process may use of it.
//!
//! Sources: `proc_meminfo(5)`, `cgroups(7)` and the kernel's `cgroup-v1/memory` and `cgroup-v2`
//! documents, `getrlimit(2)`, the kernel's `mm/transhuge` document.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use rustix::process::{Resource, getrlimit};

use crate::error::{Error, Result};

/// Facts about memory, read once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryFacts {
    /// Bytes of an ordinary page.
    pub page_size: u64,
    /// Bytes of physical memory (`MemTotal`).
    pub total: u64,
    /// Bytes that can be had without swapping, as the kernel estimates (`MemAvailable`).
    pub available: u64,
    /// The control groups that limit this process, innermost first; those without a limit are left
    /// out.
    pub cgroups: Vec<CgroupLimit>,
    /// Transparent huge pages of private memory: `always`, `madvise` or `never`; `None` if the
    /// kernel has none.
    pub huge_pages: Option<String>,
    /// Transparent huge pages of shared memory, memfd included: `always`, `within_size`, `advise`,
    /// `never`, `deny` or `force`; `None` if the kernel has none.
    pub shared_huge_pages: Option<String>,
    /// The limit of this process's address space in bytes (`RLIMIT_AS`), if there is one.
    pub address_space: Option<u64>,
    /// The limit of locked memory in bytes (`RLIMIT_MEMLOCK`), if there is one.
    pub locked_memory: Option<u64>,
}

/// The memory limit of one control group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CgroupLimit {
    /// Its directory.
    pub path: PathBuf,
    /// Bytes that its processes may use together.
    pub limit: u64,
    /// Bytes that they use, without file pages that the kernel would give up first.
    pub used: u64,
}

impl CgroupLimit {
    /// Bytes that are left.
    pub fn left(&self) -> u64 {
        self.limit.saturating_sub(self.used)
    }
}

impl MemoryFacts {
    /// Reads the facts. Fails only where `/proc/meminfo` cannot be read; what else is missing
    /// counts as absent.
    pub fn read() -> Result<Self> {
        let meminfo = read(Path::new("/proc/meminfo"))
            .map_err(|error| Error::io("reading /proc/meminfo", error))?;
        let field = |name: &str| meminfo_field(&meminfo, name);
        let total = field("MemTotal").ok_or_else(|| {
            Error::io(
                "reading MemTotal of /proc/meminfo",
                io::Error::from(io::ErrorKind::InvalidData),
            )
        })?;
        let thp = Path::new("/sys/kernel/mm/transparent_hugepage");
        Ok(Self {
            page_size: page_size(),
            total,
            // Kernels before 3.14 have no estimate.
            available: field("MemAvailable")
                .or_else(|| field("MemFree"))
                .unwrap_or(total),
            cgroups: cgroup_limits(),
            huge_pages: chosen(&thp.join("enabled")),
            shared_huge_pages: chosen(&thp.join("shmem_enabled")),
            address_space: getrlimit(Resource::As).current,
            locked_memory: getrlimit(Resource::Memlock).current,
        })
    }

    /// Bytes that this process could use if nobody else used any: physical memory, or the
    /// tightest control group.
    pub fn limit(&self) -> u64 {
        let cgroups = self.cgroups.iter().map(|group| group.limit);
        cgroups.fold(self.total, u64::min)
    }

    /// Bytes that can be had now: what is available, or what the tightest control group has left.
    pub fn obtainable(&self) -> u64 {
        let cgroups = self.cgroups.iter().map(CgroupLimit::left);
        cgroups.fold(self.available, u64::min)
    }
}

/// Bytes of an ordinary page.
pub fn page_size() -> u64 {
    rustix::param::page_size() as u64
}

/// Bytes of the first core's second-level cache; 1 MiB where the system does not say.
pub fn second_level_cache() -> u64 {
    let caches = Path::new("/sys/devices/system/cpu/cpu0/cache");
    let found = (0..8).find_map(|index| {
        let cache = caches.join(format!("index{index}"));
        let is_second = read(&cache.join("level")).ok()?.trim() == "2";
        let size = is_second.then(|| read(&cache.join("size")).ok())??;
        let kib: u64 = size.trim().strip_suffix('K')?.parse().ok()?;
        kib.checked_mul(1024)
    });
    found.unwrap_or(1 << 20)
}

/// The bytes of a `/proc/meminfo` field, which the kernel gives in KiB.
fn meminfo_field(meminfo: &str, name: &str) -> Option<u64> {
    let line = meminfo.lines().find(|line| {
        line.strip_prefix(name)
            .is_some_and(|rest| rest.starts_with(':'))
    })?;
    let kib: u64 = line.split_whitespace().nth(1)?.parse().ok()?;
    kib.checked_mul(1024)
}

/// The word in brackets of a sysfs choice: `always [madvise] never`.
fn chosen(path: &Path) -> Option<String> {
    let text = read(path).ok()?;
    let (_, rest) = text.split_once('[')?;
    Some(rest.split_once(']')?.0.to_owned())
}

/// The two versions of the memory controller, which name their files differently.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Hierarchy {
    V1,
    V2,
}

fn cgroup_limits() -> Vec<CgroupLimit> {
    let (Ok(own), Ok(mounts)) = (
        read(Path::new("/proc/self/cgroup")),
        read(Path::new("/proc/self/mountinfo")),
    ) else {
        return Vec::new();
    };
    memory_cgroups(&own, &mounts)
        .iter()
        .flat_map(|(version, mount, own)| {
            // Limits of every group from the own one up to the mount's root apply together.
            own.ancestors()
                .take_while(|path| path.starts_with(mount))
                .filter_map(|path| read_limit(*version, path))
                .collect::<Vec<_>>()
        })
        .collect()
}

/// The memory hierarchies of this process: version, where it is mounted, and the directory of the
/// own group, from `/proc/self/cgroup` and `/proc/self/mountinfo`.
fn memory_cgroups(own: &str, mounts: &str) -> Vec<(Hierarchy, PathBuf, PathBuf)> {
    let own_path = |version| {
        own.lines().find_map(|line| {
            let mut fields = line.splitn(3, ':');
            let (id, controllers, path) = (fields.next()?, fields.next()?, fields.next()?);
            let found = match version {
                Hierarchy::V1 => controllers.split(',').any(|name| name == "memory"),
                Hierarchy::V2 => id == "0" && controllers.is_empty(),
            };
            found.then(|| PathBuf::from(path))
        })
    };
    mounts
        .lines()
        .filter_map(|line| {
            let (left, right) = line.split_once(" - ")?;
            let (root, mount) = {
                let mut fields = left.split(' ').skip(3);
                (fields.next()?, PathBuf::from(fields.next()?))
            };
            let mut fields = right.split(' ');
            let version = match fields.next()? {
                "cgroup2" => Hierarchy::V2,
                "cgroup" if fields.nth(1)?.split(',').any(|option| option == "memory") => {
                    Hierarchy::V1
                }
                _ => return None,
            };
            // In a container the mount may show only a part of the tree, from `root` on. If the
            // own group lies outside (`/..` parts), the mount's own root is the best that is known.
            let path = own_path(version)?;
            let below = path.strip_prefix(root).unwrap_or(Path::new(""));
            let plain = below
                .components()
                .all(|part| matches!(part, std::path::Component::Normal(_)));
            let group = if plain {
                mount.join(below)
            } else {
                mount.clone()
            };
            Some((version, mount, group))
        })
        .collect()
}

/// The limit of the group at `path`, if it has one.
fn read_limit(version: Hierarchy, path: &Path) -> Option<CgroupLimit> {
    let (limit, used, reclaimable) = match version {
        Hierarchy::V1 => (
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
            "total_inactive_file",
        ),
        Hierarchy::V2 => ("memory.max", "memory.current", "inactive_file"),
    };
    let number = |name: &str| read(&path.join(name)).ok()?.trim().parse::<u64>().ok();
    // Version 2 says `max`, which is no number; version 1 the largest multiple of a page below 2^63.
    let limit = number(limit).filter(|&bytes| bytes < 1 << 62)?;
    let stat = read(&path.join("memory.stat")).unwrap_or_default();
    let reclaimable = stat
        .lines()
        .find_map(|line| line.strip_prefix(reclaimable)?.trim().parse::<u64>().ok())
        .unwrap_or(0);
    Some(CgroupLimit {
        path: path.to_owned(),
        limit,
        used: number(used).unwrap_or(0).saturating_sub(reclaimable),
    })
}

fn read(path: &Path) -> io::Result<String> {
    fs::read_to_string(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_machine_has_memory() {
        let facts = MemoryFacts::read().unwrap();
        assert!(facts.page_size >= 4096 && facts.page_size.is_power_of_two());
        assert!(facts.limit() <= facts.total);
        assert!((1 << 14..1 << 30).contains(&second_level_cache()));
        assert!(0 < facts.obtainable() && facts.obtainable() <= facts.total);
    }

    #[test]
    fn meminfo_is_in_kib() {
        let text = "MemTotal:       100 kB\nMemTotalX: 7 kB\nMemAvailable:   40 kB\n";
        assert_eq!(meminfo_field(text, "MemTotal"), Some(102_400));
        assert_eq!(meminfo_field(text, "MemAvailable"), Some(40_960));
        assert_eq!(meminfo_field(text, "Mem"), None);
    }

    #[test]
    fn both_cgroup_versions_are_found() {
        let own = "9:name=systemd:/\n4:cpu,memory:/jobs/a\n0::/\n";
        let mounts = "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755\n\
                      35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n\
                      41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n";
        let found = memory_cgroups(own, mounts);
        assert_eq!(found.len(), 2);
        assert_eq!(found[0].0, Hierarchy::V1);
        assert_eq!(found[0].2, Path::new("/sys/fs/cgroup/memory/jobs/a"));
        assert_eq!(found[1].0, Hierarchy::V2);
        assert_eq!(found[1].2, Path::new("/sys/fs/cgroup/unified"));
    }

    #[test]
    fn a_container_sees_its_part_of_the_tree() {
        let mounts = "35 31 0:32 /docker/x /sys/fs/cgroup rw - cgroup2 cgroup rw\n";
        let group = |own: &str| memory_cgroups(own, mounts)[0].2.clone();
        assert_eq!(group("0::/docker/x/job\n"), Path::new("/sys/fs/cgroup/job"));
        assert_eq!(group("0::/\n"), Path::new("/sys/fs/cgroup"));
        assert_eq!(group("0::/docker/x/../y\n"), Path::new("/sys/fs/cgroup"));
    }

    #[test]
    fn reclaimable_pages_do_not_count_as_used() {
        let dir = std::env::temp_dir().join(format!("deep-ep-cgroup-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        fs::write(dir.join("memory.max"), "1000\n").unwrap();
        fs::write(dir.join("memory.current"), "700\n").unwrap();
        fs::write(dir.join("memory.stat"), "anon 100\ninactive_file 300\n").unwrap();
        let limited = read_limit(Hierarchy::V2, &dir).unwrap();
        fs::write(dir.join("memory.max"), "max\n").unwrap();
        let unlimited = read_limit(Hierarchy::V2, &dir);
        fs::remove_dir_all(&dir).unwrap();
        assert_eq!(
            (limited.limit, limited.used, limited.left()),
            (1000, 400, 600)
        );
        assert_eq!(unlimited, None);
    }
}
