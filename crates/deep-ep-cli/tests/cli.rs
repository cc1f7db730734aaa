//! The program as a person or a script runs it.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
    thread,
    time::{Duration, Instant},
};

use safetensors::{Dtype, SafeTensors, tensor::TensorView};
use serde_json::Value;

fn deep_ep(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_deep-ep"));
    command
        .args(args)
        .env("DEEP_EP_TIMEOUT_SECS", "60")
        .env_remove("DEEP_EP_ENGINE");
    command
}

fn output(args: &[&str]) -> Output {
    deep_ep(args).output().unwrap()
}

/// The JSON lines of a command that must succeed.
fn json(args: &[&str]) -> Vec<Value> {
    let output = output(args);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success(),
        "{args:?}: {} {stderr}",
        output.status
    );
    let stdout = String::from_utf8(output.stdout).unwrap();
    stdout
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect()
}

/// The message of a command that must fail with `code`.
fn failure(args: &[&str], code: i32) -> String {
    let output = output(args);
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(code), "{args:?}: {stderr}");
    assert!(output.stdout.is_empty(), "{args:?} printed something");
    stderr
}

/// A file in a folder of this test run.
fn path(name: &str) -> PathBuf {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
    fs::create_dir_all(&folder).unwrap();
    folder.join(name)
}

/// Writes 6 tokens of hidden size 128 with two choices out of 8 experts.
fn write_input(name: &str, x: Dtype, idx: Dtype, change: impl Fn(&mut Vec<i64>)) -> PathBuf {
    let mut ids: Vec<i64> = vec![0, 7, 3, -1, 5, 5, -1, -1, 6, 1, 2, 4];
    change(&mut ids);
    let values = (0..6 * 128).map(|i| (i % 61) as f32 / 8.0 - 3.0);
    let x_bytes: Vec<u8> = match x {
        Dtype::F32 => values.flat_map(f32::to_le_bytes).collect(),
        Dtype::F16 => values
            .flat_map(|v| half::f16::from_f32(v).to_le_bytes())
            .collect(),
        Dtype::BF16 => values
            .flat_map(|v| half::bf16::from_f32(v).to_le_bytes())
            .collect(),
        _ => vec![0; 6 * 128],
    };
    let idx_bytes: Vec<u8> = match idx {
        Dtype::I32 => ids
            .iter()
            .flat_map(|&id| (id as i32).to_le_bytes())
            .collect(),
        _ => ids.iter().flat_map(|id| id.to_le_bytes()).collect(),
    };
    // What stands where there is no choice must not matter.
    let weights: Vec<u8> = ids
        .iter()
        .zip(1..)
        .flat_map(|(&id, n)| if id < 0 { f32::NAN } else { n as f32 / 8.0 }.to_le_bytes())
        .collect();
    let tensors = [
        ("x", TensorView::new(x, vec![6, 128], &x_bytes).unwrap()),
        (
            "topk_idx",
            TensorView::new(idx, vec![6, 2], &idx_bytes).unwrap(),
        ),
        (
            "topk_weights",
            TensorView::new(Dtype::F32, vec![6, 2], &weights).unwrap(),
        ),
    ];
    let path = path(name);
    let metadata = [("num_experts".to_owned(), "8".to_owned())].into();
    safetensors::serialize_to_file(tensors, Some(metadata), &path).unwrap();
    path
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[test]
fn the_trace_is_verified_in_every_combination() {
    for mode in ["high-throughput", "low-latency"] {
        for dtype in ["bf16", "fp8"] {
            for launch in ["threads", "processes"] {
                for outputs in ["loan", "caller"] {
                    let run = json(&[
                        "run",
                        "--mode",
                        mode,
                        "--dtype",
                        dtype,
                        "--launch",
                        launch,
                        "--outputs",
                        outputs,
                        "--iters",
                        "2",
                        "--warmup",
                        "1",
                        "--json",
                        "-",
                    ]);
                    check_report(&run, [mode, dtype, launch, outputs]);
                }
            }
        }
    }
}

fn check_report(run: &[Value], [mode, dtype, launch, outputs]: [&str; 4]) {
    let [report] = run else {
        panic!("one object was expected: {run:?}")
    };
    let expected = [
        ("engine", "cpu".into()),
        ("mode", mode.into()),
        ("launch", launch.into()),
        ("ranks", 4.into()),
        ("tokens", 1024.into()),
        ("hidden", 384.into()),
        ("top_k", 8.into()),
        ("experts", 64.into()),
        ("dtype", dtype.into()),
        ("output", outputs.into()),
        ("verified", true.into()),
    ];
    for (key, value) in expected {
        let value: Value = value;
        assert_eq!(
            report[key], value,
            "{key} of {mode} {dtype} {launch} {outputs}"
        );
    }
    let error = report["max_abs_error"].as_f64().unwrap();
    if mode == "high-throughput" {
        assert_eq!(error, 0.0);
    }
    let rows: u64 = report["received_rows"]
        .as_array()
        .unwrap()
        .iter()
        .map(|n| n.as_u64().unwrap())
        .sum();
    // The trace's 1024 tokens go to 3459 ranks of 4, or to 8 experts each.
    assert_eq!(
        rows,
        if mode == "high-throughput" {
            3459
        } else {
            8192
        }
    );
    let row_bytes = if dtype == "bf16" { 768 } else { 384 + 12 };
    assert_eq!(report["dispatch"]["bytes"], rows * row_bytes);
    assert_eq!(report["combine"]["bytes"], rows * 768);
    for operation in ["dispatch", "combine"] {
        for key in ["median_us", "min_us", "gbps"] {
            assert!(
                report[operation][key].as_f64().unwrap() > 0.0,
                "{operation} {key}"
            );
        }
    }
}

#[test]
fn with_loans_a_row_is_copied_once() {
    for launch in ["threads", "processes"] {
        let run = json(&["run", "--launch", launch, "--iters", "2", "--json", "-"]);
        let dispatch = &run[0]["dispatch"];
        assert_eq!(dispatch["copied"]["row_bytes"], dispatch["bytes"]);
        assert_eq!(run[0]["combine"]["copied"]["row_bytes"], 0);
        assert!(run[0]["memory"][0]["required"].as_u64().unwrap() > 0);
    }
}

#[test]
fn files_of_all_types_give_the_right_sum() {
    for (x, idx) in [
        (Dtype::F32, Dtype::I32),
        (Dtype::F16, Dtype::I64),
        (Dtype::BF16, Dtype::I32),
    ] {
        let input = write_input(&format!("{x:?}-{idx:?}.safetensors"), x, idx, |_| {});
        let combined = path(&format!("{x:?}-{idx:?}-combined.safetensors"));
        let run = json(&[
            "run",
            "--input",
            text(&input),
            "--output",
            text(&combined),
            "--ranks",
            "2",
            "--iters",
            "1",
            "--json",
            "-",
        ]);
        assert_eq!(run[0]["received_rows"].as_array().unwrap().len(), 2);
        let bytes = fs::read(&combined).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let tensor = file.tensor("combined").unwrap();
        assert_eq!(
            (tensor.dtype(), tensor.shape()),
            (Dtype::BF16, &[6, 128][..])
        );
        let at = |token: usize, i: usize| {
            let at = (token * 128 + i) * 2;
            half::bf16::from_le_bytes([tensor.data()[at], tensor.data()[at + 1]]).to_f32()
        };
        // Token 0: experts 0 and 7 on two ranks, weights 1/8 and 2/8: x * (1/8 + 2/8 * 15/8).
        let x = |token: usize, i: usize| ((token * 128 + i) % 61) as f32 / 8.0 - 3.0;
        for i in 0..128 {
            let right = x(0, i) * (0.125 + 0.25 * 1.875);
            assert!(
                (at(0, i) - right).abs() <= right.abs() / 100.0,
                "{} {right}",
                at(0, i)
            );
            // Token 3 chose nobody.
            assert_eq!(at(3, i), 0.0);
        }
    }
}

#[test]
fn unequal_and_empty_shards_are_verified() {
    let input = write_input("uneven.safetensors", Dtype::BF16, Dtype::I64, |_| {});
    for mode in ["high-throughput", "low-latency"] {
        for ranks in ["1", "4", "8"] {
            let run = json(&[
                "run",
                "--input",
                text(&input),
                "--ranks",
                ranks,
                "--mode",
                mode,
                "--launch",
                "threads",
                "--iters",
                "1",
                "--json",
                "-",
            ]);
            assert_eq!(run[0]["verified"], true, "{mode} {ranks}");
        }
    }
}

#[test]
fn bad_input_is_named() {
    assert!(failure(&["run", "--input", "/nowhere/at.all"], 2).contains("/nowhere/at.all"));

    let wrong_type = write_input("wrong-type.safetensors", Dtype::I8, Dtype::I64, |_| {});
    let message = failure(&["run", "--input", text(&wrong_type)], 2);
    assert!(
        message.contains("x is I8, but it must be BF16 or F32 or F16"),
        "{message}"
    );

    let outside = write_input("outside.safetensors", Dtype::BF16, Dtype::I64, |ids| {
        ids[3] = 8
    });
    let message = failure(&["run", "--input", text(&outside)], 2);
    assert!(
        message.contains("topk_idx[1, 1] is 8, but it must be below num_experts = 8"),
        "{message}"
    );

    let good = write_input("good.safetensors", Dtype::BF16, Dtype::I64, |_| {});
    let message = failure(&["run", "--input", text(&good), "--ranks", "3"], 2);
    assert!(
        message.contains("8 experts cannot be split evenly over 3 ranks"),
        "{message}"
    );
    let message = failure(&["bench", "--hidden", "136", "--dtype", "fp8"], 2);
    assert!(message.contains("multiple of 128"), "{message}");

    let text_file = path("text.safetensors");
    fs::write(&text_file, "this is no tensor").unwrap();
    assert!(failure(&["run", "--input", text(&text_file)], 2).contains("not a safetensors file"));
}

#[test]
fn sizes_that_cannot_be_are_named() {
    let bench = |option: &str, value: &str| {
        let mut args = vec!["bench", option, value];
        for (other, small) in [("--tokens", "2"), ("--hidden", "8"), ("--iters", "1")] {
            if other != option {
                args.extend([other, small]);
            }
        }
        let text = failure(&args, 2);
        assert!(!text.contains("panicked"), "{text}");
        text
    };
    assert!(bench("--tokens", "999999999999999").contains("memory"));
    assert!(bench("--hidden", "18446744073709551608").contains("memory"));
    assert!(bench("--experts", "2147483648").contains("fewer than 2^31"));
    assert!(bench("--top-k", "65").contains("at most 64"));
}

#[test]
fn a_message_is_said_once() {
    let mut command = deep_ep(&["run"]);
    command.env("DEEP_EP_ENGINE", "abacus");
    let output = command.output().unwrap();
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(text.matches("must be auto").count(), 1, "{text}");
}

#[test]
fn an_engine_that_is_not_there_is_an_error() {
    for launch in ["threads", "processes"] {
        let mut command = deep_ep(&["run", "--engine", "cuda", "--launch", launch]);
        // Also where there are GPUs.
        let output = command.env("CUDA_VISIBLE_DEVICES", "").output().unwrap();
        let message = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{message}");
        assert!(message.contains("CUDA is not supported here"), "{message}");
    }
}

#[test]
fn a_sweep_prints_one_object_per_combination() {
    let lines = json(&[
        "bench",
        "--tokens",
        "16,32",
        "--hidden",
        "128",
        "--top-k",
        "2",
        "--experts",
        "8",
        "--ranks",
        "1,2",
        "--mode",
        "high-throughput,low-latency",
        "--launch",
        "threads",
        "--groups",
        "4",
        "--top-groups",
        "2",
        "--skew",
        "0.5",
        "--iters",
        "2",
        "--warmup",
        "1",
        "--json",
        "-",
    ]);
    assert_eq!(lines.len(), 8);
    assert!(lines.iter().all(|line| line["verified"] == true));
    let sizes: Vec<_> = lines
        .iter()
        .map(|l| (l["ranks"].clone(), l["tokens"].clone()))
        .collect();
    assert_eq!(sizes[0], (1.into(), 16.into()));
    assert_eq!(sizes[7], (2.into(), 64.into()));

    let file = path("sweep.jsonl");
    let output = output(&[
        "bench",
        "--tokens",
        "8",
        "--hidden",
        "64",
        "--top-k",
        "1",
        "--experts",
        "2",
        "--iters",
        "1",
        "--no-verify",
        "--outputs",
        "loan,caller",
        "--json",
        text(&file),
    ]);
    assert!(output.status.success());
    assert!(
        String::from_utf8(output.stdout)
            .unwrap()
            .contains("dispatch")
    );
    assert_eq!(fs::read_to_string(file).unwrap().lines().count(), 2);
}

#[test]
fn doctor_says_what_there_is() {
    let report = &json(&["doctor", "--json"])[0];
    assert_eq!(report["engine"]["used"], "cpu");
    let settings = report["settings"].as_array().unwrap();
    let timeout = settings
        .iter()
        .find(|s| s["name"] == "DEEP_EP_TIMEOUT_SECS")
        .unwrap();
    assert_eq!(
        (&timeout["value"], &timeout["from"]),
        (&"60".into(), &"DEEP_EP_TIMEOUT_SECS".into())
    );
    let gpu = &report["gpu"];
    assert_eq!(gpu["driver"].is_null(), gpu["no_driver"].is_string());
    assert_eq!(
        gpu["driver"].is_null(),
        gpu["devices"].as_array().unwrap().is_empty()
    );
    assert!(output(&["doctor"]).status.success());
}

#[test]
fn the_limit_needs_a_gpu_and_says_so() {
    let report = &json(&["doctor", "--json"])[0];
    if report["gpu"]["driver"].is_null() {
        let message = failure(&["bench", "--limit"], 1);
        assert!(message.contains("CUDA is not supported here"), "{message}");
    }
    failure(&["bench", "--sms", "4"], 2);
    failure(&["bench", "--limit", "--sms", "0"], 2);
    failure(&["bench", "--limit", "--tokens", "4"], 2);
}

#[test]
fn a_warmup_that_cannot_be_says_why() {
    let shape = "warmup --hidden 2048 --experts 8 --top-k 2 --ranks 2";
    let words = |more: &str| -> Vec<String> {
        let all = format!("{shape} {more}");
        all.split_whitespace().map(str::to_owned).collect()
    };
    let fails = |more: &str, code: i32| {
        let words = words(more);
        failure(&words.iter().map(String::as_str).collect::<Vec<_>>(), code)
    };
    let report = &json(&["doctor", "--json"])[0];
    if report["gpu"]["driver"].is_null() {
        let message = fails("", 1);
        assert!(message.contains("--arch is not given"), "{message}");
    }
    let message = fails("--arch 90a --ranks 3", 2);
    assert!(message.contains("--experts is 8"), "{message}");
    let message = fails("--arch 90a --top-k 65", 2);
    assert!(message.contains("--top-k is 65"), "{message}");
    fails("--arch nine", 2);
    fails("--arch 90a --jobs 0", 2);
    failure(&["warmup", "--arch", "90a"], 2);
    // Without a compiler.
    let mut command = deep_ep(&[]);
    command.args(words("--arch 90a"));
    let output = command
        .env("DEEP_EP_NVRTC", "/nowhere/libnvrtc.so")
        .output()
        .unwrap();
    let message = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{message}");
    assert!(message.contains("/nowhere/libnvrtc.so"), "{message}");
}

#[test]
fn an_nvrtc_that_is_not_there_is_named() {
    let mut command = deep_ep(&["doctor", "--json"]);
    let output = command
        .env("DEEP_EP_NVRTC", "/nowhere/libnvrtc.so")
        .output()
        .unwrap();
    assert!(output.status.success());
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let tried = report["gpu"]["nvrtc_tried"].as_array().unwrap();
    assert_eq!(tried.len(), 1);
    assert_eq!(tried[0]["library"], "/nowhere/libnvrtc.so");
    assert!(tried[0]["refused"].is_string() && report["gpu"]["nvrtc"].is_null());
}

/// A job that would run for hours, with its ranks at work.
struct LongJob {
    launcher: Child,
    ranks: Vec<u32>,
}

impl LongJob {
    fn start() -> Self {
        let launcher = deep_ep(&["run", "--iters", "100000000"])
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let children = format!("/proc/{0}/task/{0}/children", launcher.id());
        let deadline = Instant::now() + Duration::from_secs(30);
        let mut ranks = Vec::new();
        while ranks.len() < 4 {
            assert!(Instant::now() < deadline, "the ranks did not start");
            thread::sleep(Duration::from_millis(50));
            let list = fs::read_to_string(&children).unwrap_or_default();
            ranks = list
                .split_whitespace()
                .map(|pid| pid.parse().unwrap())
                .collect();
        }
        // Let them meet.
        thread::sleep(Duration::from_millis(500));
        Self { launcher, ranks }
    }

    fn assert_nobody_is_left(&self) {
        let deadline = Instant::now() + Duration::from_secs(10);
        let alive = |pid: &u32| {
            // A zombie that its parent has not waited for is as good as gone.
            let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            stat.contains("(deep-ep)") && !stat.contains(") Z ")
        };
        while self.ranks.iter().any(alive) {
            assert!(
                Instant::now() < deadline,
                "ranks are left: {:?}",
                self.ranks
            );
            thread::sleep(Duration::from_millis(50));
        }
    }
}

fn kill(pid: u32) {
    let killed = Command::new("kill")
        .args(["-9", &pid.to_string()])
        .status()
        .unwrap();
    assert!(killed.success());
}

#[test]
fn a_killed_rank_ends_the_job() {
    let job = LongJob::start();
    let start = Instant::now();
    kill(job.ranks[2]);
    let ranks = job.ranks.clone();
    let output = job.launcher.wait_with_output().unwrap();
    assert!(start.elapsed() < Duration::from_secs(10));
    assert_eq!(output.status.code(), Some(1));
    let message = String::from_utf8(output.stderr).unwrap();
    assert!(message.contains("was killed by signal 9"), "{message}");
    for pid in ranks {
        assert!(
            !Path::new(&format!("/proc/{pid}")).exists(),
            "rank process {pid} is left"
        );
    }
}

#[test]
fn ranks_end_with_a_killed_launcher() {
    let mut job = LongJob::start();
    kill(job.launcher.id());
    job.launcher.wait().unwrap();
    job.assert_nobody_is_left();
}
