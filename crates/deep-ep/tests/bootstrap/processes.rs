//! Ranks that are processes: this test program, started again to play one rank.

use std::{
    io::{BufRead, BufReader, Write},
    process::{Child, Command, Stdio},
    sync::mpsc::{Receiver, channel},
    thread,
    time::{Duration, Instant},
};

use deep_ep::{
    Error, Rank,
    bootstrap::{Communicator, Departure},
};
use rustix::process::{Pid, Signal, kill_process};

use super::free_port;

/// Set in a process that plays a rank: what it does once all are there.
const PART: &str = "DEEP_EP_TEST_PART";
const LIMIT: Duration = Duration::from_secs(10);

/// What a started process does; in the test run itself, nothing.
#[test]
fn child_entry() {
    let Ok(part) = std::env::var(PART) else {
        return;
    };
    let end = Communicator::from_env().unwrap();
    let (send, gone) = channel();
    let _subscription = end
        .liveness()
        .subscribe(Box::new(move |rank| send.send(rank).unwrap()));
    end.barrier().unwrap();
    say(&format!("ready {}", end.local_rank()));
    match part.as_str() {
        "watch" => {
            let rank = gone.recv_timeout(LIMIT).unwrap();
            say(&format!(
                "gone {rank} {:?}",
                end.liveness().departure(rank).unwrap()
            ));
            // Until told, so that nobody sees a second departure first.
            std::io::stdin().read_line(&mut String::new()).unwrap();
        }
        "wait in barrier" => {
            let error = end.barrier().unwrap_err();
            let Error::PeerLost { ranks, .. } = error else {
                panic!("{error}");
            };
            say(&format!(
                "gone {} {:?}",
                ranks[0],
                end.liveness().departure(ranks[0]).unwrap()
            ));
            std::io::stdin().read_line(&mut String::new()).unwrap();
        }
        "wait for a stopped rank" => {
            std::io::stdin().read_line(&mut String::new()).unwrap();
            end.set_timeout(Duration::from_millis(500));
            let error = end.barrier().unwrap_err();
            let (Error::Timeout { ranks, .. } | Error::Aborted { ranks, .. }) = error else {
                panic!("{error}");
            };
            say(&format!("missed {ranks:?}"));
            // Bounded, though one peer neither reads nor closes.
            let leaving = Instant::now();
            drop(end);
            assert!(leaving.elapsed() < Duration::from_secs(3));
            say("left");
        }
        "exit without a word" => std::process::exit(0),
        "leave" => drop(end),
        other => panic!("no part {other}"),
    }
}

fn say(line: &str) {
    // On a line of its own, whatever the test harness has printed.
    println!("\nsays {line}");
}

/// A process that plays a rank, and what it says.
struct Player {
    child: Child,
    lines: Receiver<String>,
}

impl Player {
    fn start(rank: usize, size: usize, port: u16, part: &str) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args(["--exact", "processes::child_entry", "--nocapture"])
            .env_remove("DEEP_EP_SECRET")
            .env_remove("DEEP_EP_PORT")
            .env_remove("TORCHELASTIC_USE_AGENT_STORE")
            .env("MASTER_ADDR", "127.0.0.1")
            .env("MASTER_PORT", port.to_string())
            .env("RANK", rank.to_string())
            .env("LOCAL_RANK", rank.to_string())
            .env("WORLD_SIZE", size.to_string())
            .env("DEEP_EP_TIMEOUT_SECS", "10")
            .env(PART, part)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
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
        Self { child, lines }
    }

    fn hear(&self) -> String {
        self.lines.recv_timeout(LIMIT).unwrap()
    }
}

impl Drop for Player {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Starts four ranks of which `victim` plays `its_part` and the others watch, alternately idle and
/// waiting in a call; waits until all are connected.
fn start(victim: usize, its_part: &str) -> Vec<Player> {
    let port = free_port();
    let players: Vec<_> = (0..4)
        .map(|rank| {
            let part = match rank {
                _ if rank == victim => its_part,
                1 | 2 => "watch",
                _ => "wait in barrier",
            };
            Player::start(rank, 4, port, part)
        })
        .collect();
    for (rank, player) in players.iter().enumerate() {
        assert_eq!(player.hear(), format!("ready {rank}"));
    }
    players
}

fn all_others_hear(players: &[Player], victim: usize, how: Departure) {
    for (rank, player) in players.iter().enumerate() {
        if rank != victim {
            assert_eq!(
                player.hear(),
                format!("gone {} {how:?}", Rank(victim)),
                "rank {rank}"
            );
        }
    }
}

#[test]
fn a_killed_rank_is_noticed_by_all_at_once() {
    for victim in [0, 1, 3] {
        let mut players = start(victim, "watch");
        let killed = Instant::now();
        // SIGKILL: nothing of the process runs any more.
        players[victim].child.kill().unwrap();
        all_others_hear(&players, victim, Departure::Lost);
        let took = killed.elapsed();
        println!("rank {victim}'s death was noticed by all in {took:?}");
        assert!(took < Duration::from_secs(1), "{took:?}");
    }
}

#[test]
fn a_stopped_rank_is_missed_by_all_who_then_leave() {
    for victim in [0, 2] {
        let port = free_port();
        let mut players: Vec<_> = (0..3)
            .map(|rank| Player::start(rank, 3, port, "wait for a stopped rank"))
            .collect();
        for player in &players {
            player.hear();
        }
        let pid = Pid::from_child(&players[victim].child);
        kill_process(pid, Signal::STOP).unwrap();
        for (rank, player) in players.iter_mut().enumerate() {
            if rank != victim {
                player
                    .child
                    .stdin
                    .take()
                    .unwrap()
                    .write_all(b"go\n")
                    .unwrap();
            }
        }
        for (rank, player) in players.iter().enumerate() {
            if rank != victim {
                assert_eq!(player.hear(), format!("missed [Rank({victim})]"));
                assert_eq!(player.hear(), "left");
            }
        }
    }
}

#[test]
fn a_rank_that_leaves_is_told_from_one_that_just_ends() {
    let parts = [
        ("leave", Departure::Left),
        ("exit without a word", Departure::Lost),
    ];
    for (part, how) in parts {
        for victim in [0, 2] {
            all_others_hear(&start(victim, part), victim, how);
        }
    }
}

#[test]
fn a_secret_left_by_a_killed_job_does_not_break_the_next() {
    let port = free_port();
    // Rank 0 of a job whose rank 1 never comes: killed, it leaves its file behind.
    let mut stale = Player::start(0, 2, port, "leave");
    while std::net::TcpStream::connect(("127.0.0.1", port)).is_err() {
        thread::sleep(Duration::from_millis(5));
    }
    thread::sleep(Duration::from_millis(100));
    stale.child.kill().unwrap();
    stale.child.wait().unwrap();
    // Rank 1 of the next job comes first, and finds the old file.
    let one = Player::start(1, 2, port, "leave");
    thread::sleep(Duration::from_millis(200));
    let zero = Player::start(0, 2, port, "leave");
    assert_eq!(
        (zero.hear().as_str(), one.hear().as_str()),
        ("ready 0", "ready 1")
    );
}
