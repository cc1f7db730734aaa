//! Runs a case on every rank of a group: as threads of this process, or as processes.
//!
//! A process rank is this test program, started again to run only [`child_entry`], with the name of
//! the case and its parameters in the environment. A rank fails by panicking; then its communicator
//! is dropped, so the others end too, and the run fails with what the failed ranks had to say.

use std::{
    any::Any,
    collections::BTreeMap,
    fmt,
    io::Read,
    net::TcpListener,
    panic::{AssertUnwindSafe, catch_unwind},
    process::{Child, Command, ExitStatus, Stdio},
    sync::{
        atomic::{AtomicU32, Ordering},
        mpsc::{RecvTimeoutError, channel},
    },
    thread,
    time::{Duration, Instant},
};

use deep_ep::{BufferConfig, Communicator};

use crate::cases;

/// What one rank does.
pub(crate) type Case = fn(&Communicator, &Params);

/// How ranks are started.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Launch {
    /// Threads of this process.
    Threads,
    /// A process for each rank.
    Processes,
}

/// A run that is not over by then has failed.
const LIMIT: Duration = Duration::from_secs(240);
/// The longest deadline of waits inside the library, so that it, not [`LIMIT`], ends what hangs.
const TIMEOUT: Duration = Duration::from_secs(60);

const CASE: &str = "DEEP_EP_CONFORMANCE_CASE";
const PARAMS: &str = "DEEP_EP_CONFORMANCE_PARAMS";

/// What a buffer is made with in all cases: the engine that `DEEP_EP_ENGINE` names, so that another
/// engine runs the same suite.
pub(crate) fn config() -> BufferConfig {
    let config = BufferConfig::from_env().expect("the environment's settings are usable");
    BufferConfig {
        timeout: config.timeout.min(TIMEOUT),
        ..config
    }
}

/// Parameters of a case: numbers with names.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Params(BTreeMap<String, usize>);

impl Params {
    /// These with one more, or another value of one.
    pub(crate) fn with(mut self, name: &str, value: usize) -> Self {
        self.0.insert(name.into(), value);
        self
    }

    /// These and others.
    pub(crate) fn and(mut self, others: impl Into<Params>) -> Self {
        self.0.extend(others.into().0);
        self
    }

    /// The parameter called `name`, if it was given.
    pub(crate) fn get(&self, name: &str) -> Option<usize> {
        self.0.get(name).copied()
    }

    fn parse(text: &str) -> Self {
        let pairs = text.split_whitespace().map(|pair| {
            let (name, value) = pair.split_once('=').expect("name=value");
            (name.into(), value.parse().expect("a number"))
        });
        Self(pairs.collect())
    }
}

impl fmt::Display for Params {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0
            .iter()
            .try_for_each(|(name, value)| write!(f, "{name}={value} "))
    }
}

/// Declares a struct of numbers that travels as [`Params`]: each field with what it means and the
/// value it has when it is not given.
macro_rules! plan {
    ($(#[$meta:meta])* $name:ident { $($(#[$doc:meta])* $field:ident = $default:expr,)* }) => {
        $(#[$meta])*
        #[derive(Debug, Clone, PartialEq)]
        pub(crate) struct $name { $($(#[$doc])* pub(crate) $field: usize,)* }

        impl Default for $name {
            fn default() -> Self {
                Self { $($field: $default,)* }
            }
        }

        impl From<&$name> for $crate::launch::Params {
            fn from(plan: &$name) -> Self {
                Self::default()$(.with(stringify!($field), plan.$field))*
            }
        }

        impl From<&$crate::launch::Params> for $name {
            fn from(params: &$crate::launch::Params) -> Self {
                Self { $($field: params.get(stringify!($field)).unwrap_or($default),)* }
            }
        }
    };
}
pub(crate) use plan;

/// Runs the case called `case` on `ranks` ranks; panics if one of them fails.
pub(crate) fn run(launch: Launch, ranks: usize, case: &str, params: impl Into<Params>) {
    if let Err(failure) = try_run(launch, ranks, case, &params.into()) {
        panic!("{failure}");
    }
}

/// As [`run`] with both launches.
pub(crate) fn run_both(ranks: usize, case: &str, params: impl Into<Params>) {
    let params = params.into();
    run(Launch::Threads, ranks, case, params.clone());
    run(Launch::Processes, ranks, case, params);
}

/// As [`run`], but returns what the ranks that failed had to say.
pub(crate) fn try_run(
    launch: Launch,
    ranks: usize,
    case: &str,
    params: &Params,
) -> Result<(), String> {
    let failures = match launch {
        Launch::Threads => threads(ranks, case, params),
        Launch::Processes => Job::start(ranks, case, params).wait(),
    };
    if failures.is_empty() {
        return Ok(());
    }
    Err(format!(
        "{case} failed with {ranks} ranks as {launch:?}, {params}\n{}",
        failures.join("\n")
    ))
}

fn threads(ranks: usize, case: &str, params: &Params) -> Vec<String> {
    let work = cases::find(case);
    let (send, outcomes) = channel();
    for communicator in Communicator::local(ranks).expect("a group of threads") {
        let (send, params) = (send.clone(), params.clone());
        let rank = communicator.rank();
        let player = move || {
            let outcome = catch_unwind(AssertUnwindSafe(|| work(&communicator, &params)));
            drop(communicator);
            // Nobody listens any more if the run was given up.
            let _ = send.send((rank, outcome.map_err(|panic| text(&*panic))));
        };
        let thread = thread::Builder::new().name(format!("rank {rank}"));
        thread.spawn(player).expect("a thread");
    }
    drop(send);
    let deadline = Instant::now() + LIMIT;
    let mut failures = vec![];
    let mut missing = ranks;
    while missing > 0 {
        match outcomes.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Ok((rank, Err(failure))) => failures.push(format!("rank {rank}: {failure}")),
            Ok(_) => {}
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {
                failures.push(format!("{missing} ranks are not done after {LIMIT:?}"));
                break;
            }
        }
        missing -= 1;
    }
    failures
}

fn text(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().cloned();
    text.or_else(|| panic.downcast_ref::<&str>().map(|text| text.to_string()))
        .unwrap_or_else(|| "a panic without text".into())
}

/// Processes that play the ranks of one group. Killed when dropped.
pub(crate) struct Job {
    players: Vec<Player>,
    deadline: Instant,
}

/// Where and how the ranks of a job meet.
struct Meeting {
    ranks: usize,
    port: u16,
    secret: String,
}

struct Player {
    child: Child,
    output: [thread::JoinHandle<String>; 2],
    status: Option<ExitStatus>,
}

impl Job {
    /// Starts `ranks` processes for the case called `case`.
    pub(crate) fn start(ranks: usize, case: &str, params: &Params) -> Self {
        let meeting = Meeting {
            ranks,
            port: free_port(),
            secret: format!("{:016x}", getrandom::u64().expect("random bytes")),
        };
        let players = (0..ranks).map(|rank| Player::start(rank, &meeting, case, params));
        Self {
            players: players.collect(),
            deadline: Instant::now() + LIMIT,
        }
    }

    /// Waits for all; returns the output of those that failed.
    pub(crate) fn wait(mut self) -> Vec<String> {
        while self.players.iter_mut().any(|player| !player.is_done()) {
            if Instant::now() > self.deadline {
                self.kill();
            }
            thread::sleep(Duration::from_millis(5));
        }
        let players = std::mem::take(&mut self.players).into_iter();
        let failures = players
            .enumerate()
            .filter_map(|(rank, player)| player.failure(rank));
        failures.collect()
    }

    fn kill(&mut self) {
        for player in &mut self.players {
            let _ = player.child.kill();
        }
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        self.kill();
        for player in &mut self.players {
            let _ = player.child.wait();
        }
    }
}

impl Player {
    fn start(rank: usize, meeting: &Meeting, case: &str, params: &Params) -> Self {
        let program = std::env::current_exe().expect("this program's path");
        let mut child = Command::new(program)
            .args(["--exact", "launch::child_entry", "--nocapture"])
            .env_remove("DEEP_EP_PORT")
            .env_remove("TORCHELASTIC_USE_AGENT_STORE")
            .env("MASTER_ADDR", "127.0.0.1")
            .env("MASTER_PORT", meeting.port.to_string())
            .env("RANK", rank.to_string())
            .env("LOCAL_RANK", rank.to_string())
            .env("WORLD_SIZE", meeting.ranks.to_string())
            .env("DEEP_EP_SECRET", &meeting.secret)
            .env(CASE, case)
            .env(PARAMS, params.to_string())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("this program starts");
        let out = child.stdout.take().expect("piped");
        let err = child.stderr.take().expect("piped");
        Self {
            child,
            output: [collect(out), collect(err)],
            status: None,
        }
    }

    fn is_done(&mut self) -> bool {
        if self.status.is_none() {
            self.status = self.child.try_wait().expect("a child of this process");
        }
        self.status.is_some()
    }

    fn failure(self, rank: usize) -> Option<String> {
        let [out, err] = self
            .output
            .map(|reader| reader.join().expect("a reader of output"));
        let status = self.status.filter(|status| !status.success())?;
        Some(format!("rank {rank} ended with {status}\n{out}\n{err}"))
    }
}

fn collect(mut from: impl Read + Send + 'static) -> thread::JoinHandle<String> {
    thread::spawn(move || {
        let mut bytes = vec![];
        let _ = from.read_to_end(&mut bytes);
        String::from_utf8_lossy(&bytes).into_owned()
    })
}

/// A port that nobody uses. Below the range from which the system takes ports for outgoing
/// connections, so that no test running at the same time gets it by chance.
fn free_port() -> u16 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    loop {
        let n = std::process::id() * 89 + NEXT.fetch_add(1, Ordering::Relaxed);
        let port = 10_000 + (n % 20_000) as u16;
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}

/// What a started process does; in the test run itself, nothing.
#[test]
fn child_entry() {
    let Ok(case) = std::env::var(CASE) else {
        return;
    };
    let params = Params::parse(&std::env::var(PARAMS).unwrap_or_default());
    let communicator = Communicator::from_env().expect("the other ranks come");
    cases::find(&case)(&communicator, &params);
}

#[test]
fn a_failed_rank_fails_the_run_with_what_it_said() {
    for launch in [Launch::Threads, Launch::Processes] {
        let params = Params::default().with("rank", 1);
        let failure = try_run(launch, 3, "fails_on_one_rank", &params).unwrap_err();
        assert!(failure.contains("this is rank 1 giving up"), "{failure}");
        assert!(failure.contains("rank=1"), "{failure}");
    }
}

/// Panics on the rank that the parameters name; the others find it gone.
pub(crate) fn fails_on_one_rank(communicator: &Communicator, params: &Params) {
    let rank = communicator.rank();
    assert!(
        params.get("rank") != Some(rank.0),
        "this is rank {rank} giving up"
    );
    communicator.barrier().expect_err("a rank is gone");
}
