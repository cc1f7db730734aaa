//! What a job leaves behind when all its ranks are killed: nothing.

use std::{collections::BTreeSet, fs, path::Path};

use super::{
    player::Cast,
    work::{Kind, STEPS},
};

/// Files under `/dev/shm` or a temporary folder that a process has open or mapped writable.
fn files_in_shared_places(pid: u32, temporary: &Path) -> BTreeSet<String> {
    let shared = |path: &str| {
        path.starts_with("/dev/shm/") && !path.starts_with("/dev/shm/memfd:")
            || Path::new(path).starts_with(temporary)
    };
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    let mapped = maps.lines().filter_map(|line| {
        let mut words = line.split_whitespace();
        let writable = words.nth(1)?.contains('w');
        let path = words.nth(3)?;
        writable.then(|| path.to_owned())
    });
    let open = fs::read_dir(format!("/proc/{pid}/fd"))
        .unwrap()
        .filter_map(|entry| fs::read_link(entry.ok()?.path()).ok())
        .map(|path| path.display().to_string());
    mapped.chain(open).filter(|path| shared(path)).collect()
}

/// Abstract sockets, at which ranks exchange their memory.
fn sockets() -> BTreeSet<String> {
    let table = fs::read_to_string("/proc/net/unix").unwrap();
    let paths = table
        .lines()
        .filter_map(|line| line.split_whitespace().nth(7));
    paths
        .filter(|path| path.starts_with('@') && path.contains("deep"))
        .map(str::to_owned)
        .collect()
}

fn entries(folder: &Path) -> Vec<std::ffi::OsString> {
    let entries = fs::read_dir(folder).unwrap();
    entries.map(|entry| entry.unwrap().file_name()).collect()
}

#[test]
fn nothing_is_left_when_all_ranks_are_killed() {
    let temporary = std::env::temp_dir().join(format!("deep-ep-leftovers-{}", std::process::id()));
    fs::create_dir(&temporary).unwrap();
    for kind in Kind::ALL {
        let folder = |name| (name, temporary.display().to_string());
        let mut cast = Cast::new(3, kind);
        cast.env = vec![folder("TMPDIR"), folder("XDG_RUNTIME_DIR"), folder("HOME")];
        // Without a secret in the environment, rank 0 leaves one in a file until all have come.
        cast.env.push(("DEEP_EP_SECRET", String::new()));
        let mut players = cast.start();
        players.iter_mut().for_each(|player| player.go(1));
        for player in &mut players {
            player.expect_at(STEPS[1]);
        }
        for player in &players {
            let used = files_in_shared_places(player.child.id(), &temporary);
            assert!(used.is_empty(), "{kind:?}: {used:?}");
        }
        let pids: Vec<_> = players.iter().map(|player| player.child.id()).collect();
        for player in &mut players {
            player.child.kill().unwrap();
        }
        for player in &mut players {
            player.child.wait().unwrap();
        }
        // The folder for such files stays, empty.
        let secrets = temporary.join("deep-ep");
        assert_eq!(entries(&secrets), [""; 0], "{kind:?}");
        // The driver of NVIDIA's GPUs has a folder of its own.
        let left: Vec<_> = entries(&temporary)
            .into_iter()
            .filter(|name| name != ".nv")
            .collect();
        assert_eq!(left, ["deep-ep"], "{kind:?}");
        let left: Vec<_> = sockets()
            .into_iter()
            .filter(|name| pids.iter().any(|pid| name.contains(&pid.to_string())))
            .collect();
        assert_eq!(left, [""; 0], "{kind:?}");
        for entry in entries(Path::new("/dev/shm")) {
            let name = entry.to_string_lossy();
            assert!(!name.contains("deep"), "/dev/shm/{name}");
        }
    }
    fs::remove_dir_all(&temporary).unwrap();
}
