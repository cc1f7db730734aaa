//! `deep-ep launch`: a program as the ranks of a job.

use std::{
    fs,
    path::PathBuf,
    process::{Child, Command, Output, Stdio},
    thread,
    time::{Duration, Instant},
};

/// `script` on `ranks` ranks.
fn launch(ranks: usize, script: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_deep-ep"));
    command.args(["launch", "-n", &ranks.to_string(), "sh", "-c", script]);
    command
}

fn output(ranks: usize, script: &str) -> Output {
    launch(ranks, script).output().unwrap()
}

/// Lines of what was printed, sorted: ranks print in any order.
fn lines(output: &[u8]) -> Vec<String> {
    let text = String::from_utf8_lossy(output);
    let mut lines: Vec<_> = text.lines().map(str::to_owned).collect();
    lines.sort();
    lines
}

/// A file of this test run that does not exist.
fn fresh(name: &str) -> PathBuf {
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = fs::remove_file(&path);
    path
}

fn wait_for(what: &str, mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(30);
    while !done() {
        assert!(Instant::now() < deadline, "{what} did not happen");
        thread::sleep(Duration::from_millis(10));
    }
}

fn kill(signal: &str, process: u32) {
    let number = process.to_string();
    let status = Command::new("kill").args([signal, &number]).status();
    assert!(status.unwrap().success());
}

fn is_alive(process: &str) -> bool {
    // A process that ended and was not waited for is a zombie.
    let status = fs::read_to_string(format!("/proc/{process}/stat"));
    status.is_ok_and(|status| !status.contains(") Z "))
}

/// Starts `script` on two ranks; returns when both have written their process ids, with these.
fn started(name: &str, script: &str) -> (Child, Vec<String>) {
    let file = fresh(name);
    let script = format!("echo $$ >> '{}'; {script}", file.display());
    let child = launch(2, &script)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let numbers = || fs::read_to_string(&file).unwrap_or_default();
    wait_for("starting", || numbers().lines().count() == 2);
    let numbers = numbers();
    (child, numbers.lines().map(str::to_owned).collect())
}

#[test]
fn ranks_are_told_who_they_are_and_where_to_meet() {
    let done = output(
        3,
        "echo $RANK of $WORLD_SIZE, $LOCAL_RANK of $LOCAL_WORLD_SIZE, $MASTER_ADDR \
         ${MASTER_PORT:+port} ${DEEP_EP_SECRET:+secret}",
    );
    assert!(done.status.success());
    let expected = |rank| format!("[{rank}] {rank} of 3, {rank} of 3, 127.0.0.1 port secret");
    assert_eq!(lines(&done.stdout), [0, 1, 2].map(expected));
    assert!(done.stderr.is_empty());
}

#[test]
fn arguments_and_outputs_are_passed_on_line_by_line() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_deep-ep"));
    let words = [
        "launch", "--ranks", "1", "printf", "%s\\n", "-x", "a b", "--ranks",
    ];
    let done = command.args(words).output().unwrap();
    assert_eq!(
        String::from_utf8_lossy(&done.stdout),
        "[0] -x\n[0] a b\n[0] --ranks\n"
    );
    let done = output(2, "printf 'one\\n\\nthree'; echo problem >&2");
    let expected = [
        "[0] ",
        "[0] one",
        "[0] three",
        "[1] ",
        "[1] one",
        "[1] three",
    ];
    assert_eq!(lines(&done.stdout), expected);
    assert_eq!(lines(&done.stderr), ["[0] problem", "[1] problem"]);
}

#[test]
fn the_first_failure_ends_the_others_and_is_the_exit_status() {
    let begun = Instant::now();
    let done = output(3, "if [ $RANK = 1 ]; then exit 42; fi; exec sleep 100");
    assert_eq!(done.status.code(), Some(42));
    assert!(begun.elapsed() < Duration::from_secs(30));
    let said = String::from_utf8_lossy(&done.stderr);
    assert_eq!(
        said.trim(),
        "deep-ep launch: rank 1 ended with exit status 42"
    );

    let done = output(2, "if [ $RANK = 0 ]; then kill -9 $$; fi; exec sleep 100");
    assert_eq!(done.status.code(), Some(128 + 9));
}

#[test]
fn a_rank_that_does_not_listen_is_killed() {
    let done = output(
        2,
        "if [ $RANK = 1 ]; then exit 3; fi; trap '' TERM; while :; do sleep 1; done",
    );
    assert_eq!(done.status.code(), Some(3));
}

#[test]
fn a_program_that_is_not_there_is_named() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_deep-ep"));
    let done = command
        .args(["launch", "-n", "2", "/no/such/program"])
        .output()
        .unwrap();
    assert_eq!(done.status.code(), Some(127));
    assert!(String::from_utf8_lossy(&done.stderr).contains("cannot run /no/such/program"));
}

#[test]
fn signals_are_passed_on() {
    let script = "trap 'echo got it; exit 0' TERM; while :; do sleep 0.05; done";
    let (child, _) = started("launch-signals", script);
    kill("-TERM", child.id());
    let done = child.wait_with_output().unwrap();
    assert_eq!(lines(&done.stdout), ["[0] got it", "[1] got it"]);
    assert_eq!(done.status.code(), Some(128 + 15));
}

#[test]
fn nothing_outlives_a_killed_launcher() {
    let (mut child, ranks) = started("launch-killed", "while :; do sleep 0.05; done");
    kill("-KILL", child.id());
    child.wait().unwrap();
    wait_for("the end of the ranks", || {
        !ranks.iter().any(|rank| is_alive(rank))
    });
}

#[test]
fn what_a_rank_has_started_ends_with_it() {
    let file = fresh("launch-grandchild");
    let script = format!(
        "sleep 1000 >/dev/null 2>&1 & echo $! > '{}'",
        file.display()
    );
    assert!(output(1, &script).status.success());
    let left = fs::read_to_string(&file).unwrap();
    wait_for("the end of what was left", || !is_alive(left.trim()));
}

#[test]
fn ranks_are_needed() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_deep-ep"));
    assert_eq!(
        command
            .args(["launch", "true"])
            .output()
            .unwrap()
            .status
            .code(),
        Some(2)
    );
    assert_eq!(output(0, "true").status.code(), Some(2));
}
