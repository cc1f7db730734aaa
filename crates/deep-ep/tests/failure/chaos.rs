//! Many calls of all kinds with every rank late at random, then a kill at a random moment.

use std::{
    thread,
    time::{Duration, Instant, SystemTime},
};

use super::{
    player::Cast,
    work::{Kind, mix},
};

const RANKS: usize = 4;
/// Of a dispatch and a combine each.
const ROUNDS: u64 = 1000;

#[test]
fn payloads_are_right_with_every_rank_late_at_random_and_a_kill_is_noticed() {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    let seed = mix(&[now.unwrap().as_nanos() as u64]);
    println!("seed {seed}");
    let mut cast = Cast::new(RANKS, Kind::Loan);
    cast.env = vec![
        (super::player::CHAOS, seed.to_string()),
        (super::player::ROUNDS, ROUNDS.to_string()),
    ];
    let start = Instant::now();
    let mut players = cast.start();
    players.iter_mut().for_each(|player| player.go(1));
    for player in &players {
        // They check every row.
        while player.hear() != "at the last round" {
            assert!(start.elapsed() < Duration::from_secs(120));
        }
    }
    println!("{ROUNDS} rounds in {:?}", start.elapsed());
    thread::sleep(Duration::from_micros(mix(&[seed, 1]) % 20_000));
    let victim = mix(&[seed, 2]) as usize % RANKS;
    let killed = Instant::now();
    players[victim].child.kill().unwrap();
    players.remove(victim);
    for player in &players {
        let (named, error) = player.until_error();
        assert_eq!(named, format!("[{victim}]"), "{error}");
        assert!(killed.elapsed() < Duration::from_secs(2));
    }
}
