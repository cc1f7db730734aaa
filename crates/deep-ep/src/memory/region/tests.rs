use std::{
    io::{BufRead, BufReader},
    os::fd::{AsFd, OwnedFd},
    process::{Child, ChildStdout, Command, Stdio},
};

use rustix::process::{Resource, Rlimit, setrlimit};

use super::*;

const KINDS: [Backing; 2] = [Backing::Anonymous, Backing::Memfd];

/// Runs this test program again as another process, for the one test `name`, which does nothing
/// unless `DEEP_EP_TEST_CHILD` is set. Its standard input is `file`.
fn spawn(name: &str, file: Option<OwnedFd>) -> (Child, BufReader<ChildStdout>) {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "--nocapture", "--test-threads=1"])
        .arg(format!("memory::region::tests::{name}"))
        .env("DEEP_EP_TEST_CHILD", name)
        .stdin(file.map_or_else(Stdio::null, Stdio::from))
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let output = BufReader::new(child.stdout.take().unwrap());
    (child, output)
}

fn is_child(name: &str) -> bool {
    std::env::var("DEEP_EP_TEST_CHILD").is_ok_and(|value| value == name)
}

/// Reads until the child says `word`; its last word if it never does.
fn wait_for(output: &mut impl BufRead, word: &str) {
    let mut line = String::new();
    while output.read_line(&mut line).unwrap() > 0 {
        if line.contains(word) {
            return;
        }
    }
    panic!("the child ended without saying {word}: {line}");
}

fn dup_file(region: &Region) -> OwnedFd {
    region.file().unwrap().try_clone_to_owned().unwrap()
}

fn write(ptr: *mut u8, value: u8, len: usize) {
    // SAFETY: the callers pass committed ranges that only they use at this moment.
    unsafe { ptr.write_bytes(value, len) }
}

fn read(ptr: *mut u8) -> u8 {
    // SAFETY: as in `write`; volatile because another process may have written.
    unsafe { ptr.read_volatile() }
}

#[test]
fn growth_keeps_addresses_and_contents() {
    for backing in KINDS {
        let region = Region::new(backing, 1 << 30).unwrap();
        assert_eq!((region.committed(), region.reserve()), (0, 1 << 30));
        let base = region.base();
        assert!(base.addr().get().is_multiple_of(HUGE_PAGE as usize));
        assert_eq!(region.commit(1).unwrap(), COMMIT_STEP);
        write(region.ptr(0, 4096).unwrap(), 7, 4096);
        for len in [COMMIT_STEP + 1, 9 << 20, 32 << 20] {
            let committed = region.commit(len).unwrap();
            assert!(committed >= len && committed.is_multiple_of(COMMIT_STEP));
            assert_eq!(region.base(), base);
            assert_eq!(read(region.ptr(4095, 1).unwrap()), 7);
            assert_eq!(read(region.ptr(committed - 1, 1).unwrap()), 0);
        }
        assert_eq!(region.commit(5).unwrap(), 32 << 20);
    }
}

#[test]
fn a_request_beyond_the_limit_is_an_error_and_changes_nothing() {
    let too_much = MemoryFacts::read().unwrap().total * 2;
    for backing in KINDS {
        let region = Region::new(backing, too_much).unwrap();
        region.commit(1).unwrap();
        for len in [too_much, region.reserve() + 1, u64::MAX] {
            let error = region.commit(len).unwrap_err();
            assert!(
                matches!(error, Error::OutOfMemory { requested, limit, .. } if requested >= len && limit < len),
                "{error}"
            );
        }
        assert_eq!(region.committed(), COMMIT_STEP);
        assert_eq!(region.commit(COMMIT_STEP + 1).unwrap(), 2 * COMMIT_STEP);
    }
}

#[test]
fn a_failed_commit_gives_its_memory_back() {
    for backing in KINDS {
        let region = Region::new(backing, 1 << 30).unwrap();
        region.commit(COMMIT_STEP).unwrap();
        let mut file_len = region.growing.lock().unwrap();
        region.back(COMMIT_STEP, 64 << 20, &mut file_len).unwrap();
        drop(file_len);
        region.give_back(COMMIT_STEP, 64 << 20);
        assert!(region.ptr(COMMIT_STEP, 1).is_err());
        if let Some(file) = region.file() {
            let taken = rustix::fs::fstat(file).unwrap().st_blocks as u64 * 512;
            assert_eq!(taken, COMMIT_STEP);
        }
        // The same range can be had again, zeroed.
        region.commit(64 << 20).unwrap();
        assert_eq!(read(region.ptr((64 << 20) - 1, 1).unwrap()), 0);
    }
}

#[test]
fn ranges_are_checked_without_overflow() {
    let region = Region::new(Backing::Memfd, 4 * COMMIT_STEP).unwrap();
    region.commit(COMMIT_STEP).unwrap();
    let peer = PeerRegion::map(dup_file(&region), region.reserve()).unwrap();
    for (offset, len) in [
        (COMMIT_STEP, 1),
        (u64::MAX, 1),
        (1, u64::MAX),
        (0, COMMIT_STEP + 1),
    ] {
        assert!(region.ptr(offset, len).is_err());
        assert!(peer.checked(offset, len).is_err());
    }
    assert!(region.ptr(COMMIT_STEP, 0).is_ok());
    assert!(Region::new(Backing::Memfd, 0).is_err());
    assert!(Region::new(Backing::Memfd, MAX_RESERVE + 1).is_err());
}

#[test]
fn a_peer_sees_growth_without_mapping_again() {
    let region = Region::new(Backing::Memfd, 1 << 30).unwrap();
    let peer = PeerRegion::map(dup_file(&region), region.reserve()).unwrap();
    assert!(peer.checked(0, 1).is_err());
    region.commit(3 * COMMIT_STEP).unwrap();
    write(peer.checked(2 * COMMIT_STEP, 100).unwrap(), 9, 100);
    assert_eq!(read(region.ptr(2 * COMMIT_STEP + 99, 1).unwrap()), 9);
    assert_ne!(peer.base(), region.base());
}

#[test]
fn a_peer_cannot_shorten_the_file() {
    let region = Region::new(Backing::Memfd, COMMIT_STEP).unwrap();
    region.commit(1).unwrap();
    assert_eq!(ftruncate(dup_file(&region), 0), Err(Errno::PERM));
}

#[test]
fn only_sealed_memory_is_accepted_from_a_peer() {
    let unsealed = memfd_create("x", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    assert!(PeerRegion::map(unsealed, COMMIT_STEP).is_err());
    let exe = std::fs::File::open(std::env::current_exe().unwrap()).unwrap();
    assert!(PeerRegion::map(exe.into(), COMMIT_STEP).is_err());
    let (pipe, _writer) = std::io::pipe().unwrap();
    assert!(PeerRegion::map(pipe.into(), COMMIT_STEP).is_err());
    let region = Region::new(Backing::Memfd, COMMIT_STEP).unwrap();
    for reserve in [
        0,
        4096,
        COMMIT_STEP + 1,
        MAX_RESERVE + COMMIT_STEP,
        u64::MAX,
    ] {
        assert!(
            PeerRegion::map(dup_file(&region), reserve).is_err(),
            "{reserve}"
        );
    }
}

#[test]
fn the_default_reserve_fits_the_address_space() {
    let one = Region::default_reserve(1).unwrap();
    assert!(one <= MemoryFacts::read().unwrap().limit());
    let many = Region::default_reserve(1 << 20).unwrap();
    assert!((COMMIT_STEP..=1 << 26).contains(&many));
}

#[test]
fn child_writes_and_waits() {
    if is_child("child_writes_and_waits") {
        // A test that fails leaves no process behind.
        let kill = Some(rustix::process::Signal::KILL);
        rustix::process::set_parent_process_death_signal(kill).unwrap();
        let file = std::io::stdin().as_fd().try_clone_to_owned().unwrap();
        let peer = PeerRegion::map(file, 1 << 30).unwrap();
        write(peer.checked(COMMIT_STEP, 4096).unwrap(), 0x5a, 4096);
        println!("written");
        loop {
            std::thread::park();
        }
    }
}

#[test]
fn a_killed_process_leaves_the_memory_intact_and_no_files() {
    let names = || {
        let entries = std::fs::read_dir("/dev/shm")
            .into_iter()
            .flatten()
            .flatten();
        entries
            .map(|entry| entry.file_name().to_string_lossy().into_owned())
            .filter(|name| name.contains("deep-ep"))
            .count()
    };
    let before = names();
    let region = Region::new(Backing::Memfd, 1 << 30).unwrap();
    region.commit(2 * COMMIT_STEP).unwrap();
    write(region.ptr(0, 1).unwrap(), 1, 1);
    let (mut child, mut output) = spawn("child_writes_and_waits", Some(dup_file(&region)));
    wait_for(&mut output, "written");
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(read(region.ptr(COMMIT_STEP + 4095, 1).unwrap()), 0x5a);
    assert_eq!(read(region.ptr(0, 1).unwrap()), 1);
    region.commit(3 * COMMIT_STEP).unwrap();
    write(region.ptr(2 * COMMIT_STEP, 4096).unwrap(), 2, 4096);
    assert_eq!(names(), before);
}

#[test]
fn child_with_an_address_space_limit() {
    if is_child("child_with_an_address_space_limit") {
        let limit = Some(1 << 30);
        let both = Rlimit {
            current: limit,
            maximum: limit,
        };
        setrlimit(Resource::As, both).unwrap();
        assert!(Region::default_reserve(1).unwrap() <= 1 << 29);
        for backing in KINDS {
            let region = Region::new(backing, 1 << 40).unwrap();
            assert!(region.reserve() >= 128 << 20 && region.reserve() < 1 << 30);
            region.commit(COMMIT_STEP).unwrap();
            assert!(region.commit(1 << 40).is_err());
        }
        println!("reserved");
    }
}

#[test]
fn a_refused_reservation_falls_back_to_a_smaller_one() {
    let (mut child, mut output) = spawn("child_with_an_address_space_limit", None);
    wait_for(&mut output, "reserved");
    assert!(child.wait().unwrap().success());
}
