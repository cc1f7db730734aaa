//! Symmetric memory of real GPUs, between threads and between processes; without a GPU these tests
//! return at once.
//!
//! A process rank is this test program, started again to run only [`child`], with its rank and what
//! to do in the environment. Rank 0 is the test itself.

use std::{
    net::TcpListener,
    process::{Child, Command, Stdio},
    sync::MutexGuard,
};

use super::{waiting::Waiting, *};
use crate::{
    bootstrap::TcpConfig,
    engine::cuda::driver::{
        checked::{Driver, call},
        stream::Stream,
    },
};

const WORK: &str = "DEEP_EP_TEST_SYMMETRIC";
const RANK: &str = "DEEP_EP_TEST_SYMMETRIC_RANK";
const RANKS: &str = "DEEP_EP_TEST_SYMMETRIC_RANKS";
const PORT: &str = "DEEP_EP_TEST_SYMMETRIC_PORT";
const GPUS: &str = "DEEP_EP_TEST_SYMMETRIC_GPUS";

/// What one rank does, with its GPU.
type Work = fn(&Communicator, &Arc<Context>);

/// By name, for the processes.
const WORKS: [(&str, Work); 3] = [
    ("exchange", exchange),
    ("grow_while_a_kernel_runs", grow_while_a_kernel_runs),
    ("is_killed", is_killed),
];

/// All GPUs, for one test at a time: calls of another test could wait for this one's kernel, and
/// hold a lock of the driver meanwhile. `None` if there are none.
fn gpus() -> Option<(MutexGuard<'static, ()>, Vec<Device>)> {
    static TURN: Mutex<()> = Mutex::new(());
    match Driver::get() {
        Ok(_) => {
            let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
            Some((turn, Device::all().unwrap()))
        }
        Err(error) => {
            println!("no GPU: skipped ({error})");
            None
        }
    }
}

/// Ranks of a test that uses all these GPUs.
fn ranks_of(gpus: &[Device]) -> usize {
    gpus.len().clamp(2, 8)
}

/// Runs `work` on threads, by turns on these GPUs.
fn threads(ranks: usize, gpus: &[Device], work: Work) {
    thread::scope(|scope| {
        for communicator in Communicator::local(ranks).unwrap() {
            scope.spawn(move || {
                let gpu = gpus[communicator.rank().0 % gpus.len()];
                work(&communicator, &Context::new(gpu).unwrap());
            });
        }
    });
}

/// Processes of ranks 1.. and rank 0's end. The processes are killed if the test fails.
struct Group {
    communicator: Communicator,
    context: Arc<Context>,
    children: Vec<Child>,
}

impl Group {
    fn start(ranks: usize, gpus: &[Device], work: &str) -> Self {
        let port = free_port();
        let start = |rank: usize| {
            Command::new(std::env::current_exe().unwrap())
                .args(["--exact", "--nocapture"])
                .arg("engine::cuda::symmetric::tests::gpu::child")
                .env(WORK, work)
                .env(RANK, rank.to_string())
                .env(RANKS, ranks.to_string())
                .env(PORT, port.to_string())
                .env(GPUS, gpus.len().to_string())
                .stdin(Stdio::null())
                .spawn()
                .unwrap()
        };
        let children = (1..ranks).map(start).collect();
        Self {
            communicator: join(0, ranks, port),
            context: Context::new(gpus[0]).unwrap(),
            children,
        }
    }

    /// Waits for the processes, which must have had success.
    fn wait(mut self) {
        for mut child in std::mem::take(&mut self.children) {
            assert!(child.wait().unwrap().success());
        }
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        for child in &mut self.children {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn join(rank: usize, world_size: usize, port: u16) -> Communicator {
    let config = TcpConfig {
        rank,
        world_size,
        local_rank: rank,
        address: "127.0.0.1".into(),
        port,
        secret: None,
        timeout: LONG,
    };
    Communicator::tcp(config).unwrap()
}

/// A port below those that the system gives to outgoing connections.
fn free_port() -> u16 {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    loop {
        let n = u64::from(std::process::id()) * 89 + NEXT.fetch_add(1, Ordering::Relaxed);
        let port = 10_000 + (n % 20_000) as u16;
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}

/// What a started process does; in the test run itself, nothing.
#[test]
fn child() {
    let Ok(name) = std::env::var(WORK) else {
        return;
    };
    // A test that fails leaves no process behind.
    let kill = Some(rustix::process::Signal::KILL);
    rustix::process::set_parent_process_death_signal(kill).unwrap();
    let number = |name: &str| std::env::var(name).unwrap().parse::<usize>().unwrap();
    let (rank, gpus) = (number(RANK), number(GPUS));
    let (_, work) = WORKS.iter().find(|(known, _)| *known == name).unwrap();
    let communicator = join(rank, number(RANKS), number(PORT) as u16);
    let gpu = Device::all().unwrap()[rank % gpus];
    work(&communicator, &Context::new(gpu).unwrap());
}

fn processes(ranks: usize, gpus: &[Device], name: &str) {
    let group = Group::start(ranks, gpus, name);
    let (_, work) = WORKS.iter().find(|(known, _)| *known == name).unwrap();
    work(&group.communicator, &group.context);
    group.wait();
}

/// Stores `byte` into a range and waits for it.
fn store(context: &Arc<Context>, address: u64, bytes: u64, byte: u8) {
    let stream = Stream::new(context).unwrap();
    let _entered = context.enter().unwrap();
    // SAFETY: tests store only into symmetric memory that is mapped.
    unsafe {
        call!(
            context.device.driver,
            cuMemsetD8Async(address, byte, bytes as usize, stream.raw)
        )
    }
    .unwrap();
    stream.synchronize().unwrap();
}

/// A range's contents.
fn load(context: &Arc<Context>, address: u64, bytes: u64) -> Vec<u8> {
    let stream = Stream::new(context).unwrap();
    let _entered = context.enter().unwrap();
    let mut data = vec![0xee; bytes as usize];
    // SAFETY: tests load only from symmetric memory that is mapped; the vector is long enough and
    // lives until the copy is done.
    unsafe {
        call!(
            context.device.driver,
            cuMemcpyDtoHAsync_v2(data.as_mut_ptr().cast(), address, data.len(), stream.raw)
        )
    }
    .unwrap();
    stream.synchronize().unwrap();
    data
}

fn assert_all(context: &Arc<Context>, address: u64, bytes: u64, byte: u8) {
    let data = load(context, address, bytes);
    let wrong = data.iter().position(|&found| found != byte);
    assert_eq!(wrong.map(|at| (at, data[at])), None, "wanted {byte}");
}

/// A number of every rank.
fn all_numbers(communicator: &Communicator, mine: u64) -> Vec<u64> {
    let all = communicator.all_gather(&mine.to_le_bytes()).unwrap();
    let numbers = all
        .iter()
        .map(|bytes| u64::from_le_bytes(bytes[..].try_into().unwrap()));
    numbers.collect()
}

const COMMIT: u64 = 3 << 20;
const GROWTH: u64 = 5 << 20;

fn make(communicator: &Communicator, context: &Arc<Context>) -> Symmetric {
    Symmetric::new(communicator, context, 1 << 30, COMMIT, LONG).unwrap()
}

/// Everybody loads and stores everybody's memory, that of the beginning and that of later.
fn exchange(communicator: &Communicator, context: &Arc<Context>) {
    let (rank, ranks) = (communicator.rank().0, communicator.size());
    let memory = make(communicator, context);
    assert!(memory.committed() >= COMMIT && memory.reserved() == 1 << 30);
    let uuid = context.device.uuid().unwrap();
    assert_eq!(memory.gpu_of(rank).uuid, uuid);
    let here = (0..ranks).filter(|&peer| memory.gpu_of(peer).uuid == uuid);
    assert!(here.eq(memory.ranks_on_this_gpu().iter().copied()));
    let mine = memory.base(rank);
    for peer in 0..ranks {
        assert_all(context, memory.base(peer), COMMIT, 0);
    }
    communicator.barrier().unwrap();
    store(context, mine, COMMIT, 1 + rank as u8);
    communicator.barrier().unwrap();
    for peer in 0..ranks {
        assert_all(context, memory.base(peer), COMMIT, 1 + peer as u8);
    }
    // Growth, of all at once and twice, by different sizes.
    for turn in 0..2u8 {
        let offset = memory.committed();
        let more = GROWTH + ((rank as u64) << 20);
        memory.commit(offset + more).unwrap();
        assert!(memory.committed() >= offset + more);
        store(
            context,
            mine + offset,
            more,
            0x40 + 0x20 * turn + rank as u8,
        );
        let offsets = all_numbers(communicator, offset);
        for (peer, offset) in offsets.into_iter().enumerate() {
            let more = GROWTH + ((peer as u64) << 20);
            let byte = 0x40 + 0x20 * turn + peer as u8;
            assert_all(context, memory.base(peer) + offset, more, byte);
        }
    }
    // What was there before has stayed, at the same address.
    assert_eq!(memory.base(rank), mine);
    assert_all(context, mine, COMMIT, 1 + rank as u8);
    communicator.barrier().unwrap();
    for peer in 0..ranks {
        store(
            context,
            memory.base(peer) + rank as u64,
            1,
            0xa0 + rank as u8,
        );
    }
    communicator.barrier().unwrap();
    let stored = load(context, mine, ranks as u64);
    assert!(
        stored
            .iter()
            .copied()
            .eq((0..ranks).map(|peer| 0xa0 + peer as u8))
    );
    // What is too much changes nothing.
    let error = memory.commit(memory.reserved() + 1).unwrap_err();
    assert!(matches!(error, Error::OutOfMemory { purpose, .. } if purpose == PURPOSE));
    // The last rank goes first; the others keep what they had of it, except that its process ends.
    communicator.barrier().unwrap();
    if rank + 1 == ranks {
        drop(memory);
        communicator.barrier().unwrap();
    } else {
        communicator.barrier().unwrap();
        memory.commit(memory.committed() + 1).unwrap();
        let last = memory.base(ranks - 1) + COMMIT - 1;
        assert_all(context, last, 1, ranks as u8);
    }
}

#[test]
fn threads_on_one_gpu() {
    if let Some((_turn, gpus)) = gpus() {
        threads(2, &gpus[..1], exchange);
    }
}

#[test]
fn threads_on_all_gpus() {
    if let Some((_turn, gpus)) = gpus() {
        threads(ranks_of(&gpus), &gpus, exchange);
    }
}

#[test]
fn processes_on_one_gpu() {
    if let Some((_turn, gpus)) = gpus() {
        processes(2, &gpus[..1], "exchange");
    }
}

#[test]
fn processes_on_all_gpus() {
    if let Some((_turn, gpus)) = gpus() {
        processes(ranks_of(&gpus), &gpus, "exchange");
    }
}

/// A rank that stores into its memory, grows it, and is killed then.
fn is_killed(communicator: &Communicator, context: &Arc<Context>) {
    let memory = make(communicator, context);
    let offset = memory.committed();
    memory.commit(offset + GROWTH).unwrap();
    let mine = memory.base(communicator.rank().0);
    store(context, mine, offset + GROWTH, 0x77);
    all_numbers(communicator, offset);
    loop {
        thread::park();
    }
}

fn memory_outlives_a_killed_process(gpus: &[Device]) {
    let mut group = Group::start(2, gpus, "is_killed");
    let context = group.context.clone();
    let memory = make(&group.communicator, &context);
    let offset = all_numbers(&group.communicator, 0)[1];
    let child = &mut group.children[0];
    child.kill().unwrap();
    child.wait().unwrap();
    let theirs = memory.base(1);
    assert_all(&context, theirs, offset + GROWTH, 0x77);
    store(&context, theirs, offset + GROWTH, 0x78);
    assert_all(&context, theirs, offset + GROWTH, 0x78);
    // The dead one is not waited for.
    let start = Instant::now();
    memory.commit(memory.committed() + GROWTH).unwrap();
    assert!(start.elapsed() < LONG / 2);
    store(&context, memory.base(0), memory.committed(), 0x79);
    assert_all(&context, memory.base(0), memory.committed(), 0x79);
}

#[test]
fn memory_outlives_a_killed_process_on_one_gpu() {
    if let Some((_turn, gpus)) = gpus() {
        memory_outlives_a_killed_process(&gpus[..1]);
    }
}

#[test]
fn memory_outlives_a_killed_process_on_two_gpus() {
    match gpus() {
        Some((_turn, gpus)) if gpus.len() >= 2 => memory_outlives_a_killed_process(&gpus[..2]),
        Some(_) => println!("one GPU: skipped"),
        None => {}
    }
}

#[test]
fn memory_is_given_back() {
    let Some((_turn, gpus)) = gpus() else {
        return;
    };
    let context = Context::new(gpus[0]).unwrap();
    let more_than_half = context.device.memory().unwrap() / 5 * 3;
    for _ in 0..3 {
        let communicator = Communicator::local(1).unwrap().pop().unwrap();
        let memory = Symmetric::new(&communicator, &context, 0, 1, LONG).unwrap();
        assert!(memory.reserved() >= context.device.memory().unwrap());
        memory.commit(more_than_half).unwrap();
        // There is no more than there is, and asking does no harm.
        let error = memory.commit(memory.reserved()).unwrap_err();
        assert!(matches!(error, Error::OutOfMemory { purpose, .. } if purpose == PURPOSE));
        store(&context, memory.base(0) + more_than_half - 1, 1, 5);
        assert_all(&context, memory.base(0) + more_than_half - 1, 1, 5);
    }
}

/// All ranks grow while a kernel of rank 0 runs, which then reads what the last rank has grown.
fn grow_while_a_kernel_runs(communicator: &Communicator, context: &Arc<Context>) {
    let (rank, last) = (communicator.rank().0, communicator.size() - 1);
    let memory = make(communicator, context);
    let offset = memory.committed();
    let waiting = (rank == 0).then(|| Waiting::new(context)).flatten();
    // What could wait for the kernel is over on all ranks.
    communicator.barrier().unwrap();
    waiting.iter().for_each(Waiting::launch);
    communicator.barrier().unwrap();
    memory.commit(offset + GROWTH).unwrap();
    if rank == last {
        store(context, memory.base(rank) + offset, GROWTH, 0x5a);
    }
    let offsets = all_numbers(communicator, offset);
    if let Some(waiting) = &waiting {
        let address = memory.base(last) + offsets[last] + GROWTH - 1;
        assert_eq!(waiting.end(address), 0x5a);
    }
    communicator.barrier().unwrap();
}

#[test]
fn threads_grow_while_a_kernel_runs_on_one_gpu() {
    if let Some((_turn, gpus)) = gpus() {
        threads(2, &gpus[..1], grow_while_a_kernel_runs);
    }
}

#[test]
fn threads_grow_while_a_kernel_runs_on_all_gpus() {
    if let Some((_turn, gpus)) = gpus() {
        threads(ranks_of(&gpus), &gpus, grow_while_a_kernel_runs);
    }
}

#[test]
fn processes_grow_while_a_kernel_runs_on_one_gpu() {
    if let Some((_turn, gpus)) = gpus() {
        processes(2, &gpus[..1], "grow_while_a_kernel_runs");
    }
}

#[test]
fn processes_grow_while_a_kernel_runs_on_all_gpus() {
    if let Some((_turn, gpus)) = gpus() {
        processes(ranks_of(&gpus), &gpus, "grow_while_a_kernel_runs");
    }
}
