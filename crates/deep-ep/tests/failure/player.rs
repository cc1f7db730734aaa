//! Ranks that are processes: this test program, started again to play one rank, step by step.

use std::{
    io::{BufRead, BufReader, Write},
    net::TcpListener,
    process::{Child, ChildStdin, Command, Stdio},
    sync::{
        atomic::{AtomicU32, Ordering},
        mpsc::{Receiver, RecvTimeoutError, channel},
    },
    thread,
    time::{Duration, Instant},
};

use deep_ep::{Buffer, Communicator};

use super::work::{self, Kind, mix};

/// Set in a process that plays a rank: the [`Kind`] of its rounds.
const KIND: &str = "DEEP_EP_TEST_KIND";
/// Set where its buffer is to mask absent ranks.
const SHRINK: &str = "DEEP_EP_TEST_SHRINK";
/// Set where it is to be late at random between steps instead of waiting for lines: the seed.
pub(crate) const CHAOS: &str = "DEEP_EP_TEST_CHAOS";
/// Rounds after which it then says `at the last round`; it goes on until it fails.
pub(crate) const ROUNDS: &str = "DEEP_EP_TEST_ROUNDS";
/// Longer than anything here takes but a test's own long loop.
const LIMIT: Duration = Duration::from_secs(60);

/// A port that nobody uses, below the range from which the system takes ports for outgoing
/// connections.
pub(crate) fn free_port() -> u16 {
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
///
/// It says `at STEP` before each step and does it when a line comes. When a call fails it says
/// `error RANKS: TEXT`, checks that the buffer is of no more use and that dropping it takes no time,
/// and waits to be told a new group, in which it works again.
#[test]
fn entry() {
    let Ok(kind) = std::env::var(KIND) else {
        return;
    };
    let kind = Kind::parse(&kind).unwrap();
    let communicator = Communicator::from_env().unwrap();
    let mut config = work::config(communicator.size());
    config.enable_shrink = std::env::var_os(SHRINK).is_some();
    let buffer = Buffer::new(&communicator, config).unwrap();
    let mut step = |name: &'static str| {
        let masked = buffer.masks().unwrap_or_default();
        let masked = masked
            .iter()
            .map(|&masked| char::from(b'0' + u8::from(masked)));
        say(&format!("at {name} {}", masked.collect::<String>()));
        listen();
    };
    let error = match number(CHAOS) {
        None => (1..).find_map(|call| work::round(&buffer, kind, call, &mut step).err()),
        Some(seed) => {
            step(work::STEPS[0]);
            chaos(&buffer, seed)
        }
    };
    let error = error.unwrap();
    let ranks = work::ranks_named(&error);
    let start = Instant::now();
    let again = work::round(&buffer, kind, 1000, &mut |_| ()).unwrap_err();
    let barrier = buffer.barrier().unwrap_err();
    drop((buffer, communicator));
    let took = start.elapsed();
    assert!(
        took < Duration::from_secs(1),
        "after the error: {again}; {barrier}; dropped; all that took {took:?}"
    );
    say(&format!("error {ranks:?}: {error}"));
    loop {
        let line = listen();
        let mut words = line
            .split(' ')
            .skip_while(|word| *word != "regroup")
            .skip(1);
        let mut next = || words.next().and_then(|word| word.parse::<usize>().ok());
        if let (Some(rank), Some(ranks), Some(port)) = (next(), next(), next()) {
            regroup(rank, ranks, port as u16);
            say("works");
        }
    }
}

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok()?.parse().ok()
}

/// Rounds of all kinds, with pauses of 0 to 2 ms, until one fails.
fn chaos(buffer: &Buffer, seed: u64) -> Option<deep_ep::Error> {
    let rounds = number(ROUNDS).unwrap();
    (1..).find_map(|call| {
        if call == rounds {
            say("at the last round");
        }
        let kind = Kind::ALL[mix(&[seed, call]) as usize % 3];
        let mut steps = 0;
        let mut late = |_| {
            steps += 1;
            let random = mix(&[seed, call, buffer.rank().0 as u64, steps]);
            if random.is_multiple_of(2) {
                thread::sleep(Duration::from_micros(random / 2 % 2000));
            }
        };
        work::round(buffer, kind, call, &mut late).err()
    })
}

/// Joins a new group and works there.
fn regroup(rank: usize, ranks: usize, port: u16) {
    let mut settings = deep_ep::Settings::from_env().unwrap();
    settings.rank.value = rank;
    settings.world_size.value = ranks;
    settings.port.value = port;
    let communicator = Communicator::from_settings(&settings).unwrap();
    let buffer = Buffer::new(&communicator, work::config(ranks)).unwrap();
    for (call, kind) in Kind::ALL.into_iter().cycle().take(6).enumerate() {
        work::round(&buffer, kind, call as u64, &mut |_| ()).unwrap();
    }
}

fn say(line: &str) {
    // Not println, which the test harness would capture.
    let mut stdout = std::io::stdout();
    writeln!(stdout, "\nsays {line}").unwrap();
}

/// The next line from the test; ends the process when there is none.
fn listen() -> String {
    let mut line = String::new();
    match std::io::stdin().read_line(&mut line) {
        Ok(1..) => line.trim().to_owned(),
        _ => std::process::exit(0),
    }
}

/// A group of processes to be started.
#[derive(Clone)]
pub(crate) struct Cast {
    pub(crate) ranks: usize,
    pub(crate) kind: Kind,
    /// Deadline of waits in seconds, through the environment.
    pub(crate) timeout: &'static str,
    pub(crate) shrink: bool,
    /// More variables.
    pub(crate) env: Vec<(&'static str, String)>,
}

impl Cast {
    pub(crate) fn new(ranks: usize, kind: Kind) -> Self {
        Self {
            ranks,
            kind,
            timeout: "60",
            shrink: false,
            env: vec![],
        }
    }

    /// Starts all and waits until they are about to begin their first call.
    pub(crate) fn start(&self) -> Vec<Player> {
        let port = free_port();
        let mut players: Vec<_> = (0..self.ranks)
            .map(|rank| Player::start(self, rank, port))
            .collect();
        for player in &mut players {
            player.expect_at(work::STEPS[0]);
        }
        players
    }
}

/// A process that plays a rank, and what it says.
pub(crate) struct Player {
    pub(crate) child: Child,
    stdin: ChildStdin,
    lines: Receiver<String>,
    rank: usize,
}

impl Player {
    fn start(cast: &Cast, rank: usize, port: u16) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args(["--exact", "player::entry", "--nocapture"])
            .env_remove("DEEP_EP_PORT")
            .env_remove("TORCHELASTIC_USE_AGENT_STORE")
            .env_remove("LOCAL_WORLD_SIZE")
            .env("DEEP_EP_SECRET", "the secret of these tests")
            .env("MASTER_ADDR", "127.0.0.1")
            .env("MASTER_PORT", port.to_string())
            .env("RANK", rank.to_string())
            .env("LOCAL_RANK", rank.to_string())
            .env("WORLD_SIZE", cast.ranks.to_string())
            .env("DEEP_EP_TIMEOUT_SECS", cast.timeout)
            .env(KIND, cast.kind.name())
            .envs(cast.env.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        if cast.shrink {
            command.env(SHRINK, "1");
        }
        let mut child = command.spawn().unwrap();
        let (send, lines) = channel();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        thread::spawn(move || {
            for line in stdout.lines().map_while(Result::ok) {
                if let Some(said) = line.strip_prefix("says ") {
                    let _ = send.send(said.to_owned());
                }
            }
        });
        Self {
            stdin: child.stdin.take().unwrap(),
            child,
            lines,
            rank,
        }
    }

    /// Lets it do `steps` more steps, without waiting for them.
    pub(crate) fn go(&mut self, steps: usize) {
        self.tell(&"go\n".repeat(steps));
    }

    pub(crate) fn tell(&mut self, lines: &str) {
        // It may be dead.
        let _ = self.stdin.write_all(lines.as_bytes());
    }

    pub(crate) fn hear(&self) -> String {
        match self.lines.recv_timeout(LIMIT) {
            Ok(line) => line,
            Err(RecvTimeoutError::Timeout) => panic!("rank {} hangs", self.rank),
            Err(RecvTimeoutError::Disconnected) => panic!("rank {} has ended", self.rank),
        }
    }

    /// Waits until it is about to do `step`; returns its masks.
    pub(crate) fn expect_at(&mut self, step: &str) -> String {
        let line = self.hear();
        let at = line
            .strip_prefix("at ")
            .and_then(|line| line.rsplit_once(' '));
        match at {
            Some((at, masks)) if at == step => masks.to_owned(),
            _ => panic!(
                "rank {} says {line:?} instead of being at {step}",
                self.rank
            ),
        }
    }

    /// Waits until it fails, however many steps it still gets done of those that it was let do;
    /// returns the ranks that its error names, and the error.
    pub(crate) fn until_error(&self) -> (String, String) {
        loop {
            let line = self.hear();
            if let Some(error) = line.strip_prefix("error ") {
                let (ranks, text) = error.split_once(": ").unwrap();
                return (ranks.to_owned(), text.to_owned());
            }
        }
    }
}

impl Drop for Player {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
