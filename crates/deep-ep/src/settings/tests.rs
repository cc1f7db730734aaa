use super::*;

fn settings(pairs: &[(&str, &str)]) -> Result<Settings> {
    Settings::from_lookup(|name| {
        pairs
            .iter()
            .find(|(key, _)| *key == name)
            .map(|(_, value)| value.into())
    })
}

fn message(pairs: &[(&str, &str)]) -> String {
    settings(pairs).unwrap_err().to_string()
}

#[test]
fn an_empty_environment_gives_the_defaults() {
    let s = settings(&[]).unwrap();
    assert_eq!(s.engine.value, EngineChoice::Auto);
    assert_eq!(s.timeout.value, Duration::from_secs(300));
    assert_eq!(
        (s.rank.value, s.world_size.value, s.local_rank.value),
        (0, 1, 0)
    );
    assert_eq!(
        (s.master_addr.value.as_str(), s.port.value),
        ("127.0.0.1", 8361)
    );
    assert!(s.iter().all(|line| line.origin == Origin::Default));
}

#[test]
fn values_carry_the_variable_they_came_from() {
    let s = settings(&[
        ("DEEP_EP_ENGINE", "cpu"),
        ("DEEP_EP_TIMEOUT_SECS", "0.25"),
        ("HOME", "/home/me"),
        ("MASTER_PORT", "1234"),
        ("RANK", "5"),
        ("WORLD_SIZE", "8"),
        ("LOCAL_WORLD_SIZE", "4"),
    ])
    .unwrap();
    assert_eq!(
        s.engine,
        Setting {
            value: EngineChoice::Cpu,
            origin: Origin::Env("DEEP_EP_ENGINE")
        }
    );
    assert_eq!(s.timeout.value, Duration::from_millis(250));
    assert_eq!(
        s.cache_dir.value.as_deref(),
        Some("/home/me/.cache/deep-ep".as_ref())
    );
    assert_eq!(s.cache_dir.origin, Origin::Env("HOME"));
    assert_eq!(
        (s.port.value, s.port.origin),
        (1234, Origin::Env("MASTER_PORT"))
    );
    assert_eq!(
        (s.local_rank.value, s.local_rank.origin),
        (1, Origin::Default)
    );
    assert!(!s.single_host());
}

#[test]
fn bad_values_name_the_variable_the_value_and_the_limit() {
    assert_eq!(
        message(&[("DEEP_EP_ENGINE", "gpu")]),
        "DEEP_EP_ENGINE is \"gpu\", but it must be auto, cpu or cuda"
    );
    assert_eq!(
        message(&[("RANK", "4"), ("WORLD_SIZE", "4")]),
        "RANK is 4, but it must be below WORLD_SIZE = 4"
    );
    assert_eq!(
        message(&[("WORLD_SIZE", "-1")]),
        "WORLD_SIZE is \"-1\", but it must be an integer of 1 to 65536"
    );
    for bad in ["0", "-1", "NaN", "inf", "1e300", "soon", "1e-12"] {
        let text = message(&[("DEEP_EP_TIMEOUT_SECS", bad)]);
        assert!(
            text.contains("DEEP_EP_TIMEOUT_SECS") && text.contains(bad),
            "{text}"
        );
    }
    assert!(message(&[("MASTER_PORT", "0")]).contains("1 to 65535"));
    assert!(message(&[("DEEP_EP_SECRET", &"x".repeat(1025))]).contains("1025 bytes long"));
}

#[test]
fn the_port_steps_aside_where_the_agent_of_torchrun_listens() {
    let agent = ("TORCHELASTIC_USE_AGENT_STORE", "True");
    let port = |pairs: &[_]| settings(pairs).unwrap().port.value;
    assert_eq!(port(&[("MASTER_PORT", "29500"), agent]), 29501);
    assert_eq!(port(&[("MASTER_PORT", "65535"), agent]), 65534);
    assert_eq!(
        port(&[("MASTER_PORT", "29500"), ("DEEP_EP_PORT", "7000"), agent]),
        7000
    );
}

#[test]
fn the_secret_is_never_shown() {
    let s = settings(&[("DEEP_EP_SECRET", "hunter2-hunter2")]).unwrap();
    let shown = format!("{s:?} {:?}", s.iter().collect::<Vec<_>>());
    assert!(!shown.contains("hunter2"), "{shown}");
    assert!(
        s.iter()
            .any(|line| line.name == "DEEP_EP_SECRET" && line.value == "hidden")
    );
}

#[test]
fn the_cache_folder_has_two_names_and_two_defaults() {
    let all = [
        ("DEEP_EP_CACHE_DIR", "/own"),
        ("EP_JIT_CACHE_DIR", "/other"),
        ("XDG_CACHE_HOME", "/xdg"),
        ("HOME", "/home/me"),
    ];
    for (from, folder) in ["/own", "/other", "/xdg/deep-ep", "/home/me/.cache/deep-ep"]
        .into_iter()
        .enumerate()
    {
        let found = settings(&all[from..]).unwrap().cache_dir;
        assert_eq!(found.value.as_deref(), Some(folder.as_ref()));
        assert_eq!(found.origin, Origin::Env(all[from].0));
    }
    assert_eq!(settings(&[]).unwrap().cache_dir.value, None);
}
