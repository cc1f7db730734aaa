//! The diagnosis as text.

use super::Diagnosis;
use crate::table::bytes;

/// Lines of a section: a name and what is known about it.
pub(super) type Facts = Vec<(&'static str, String)>;

pub(super) fn text(diagnosis: &Diagnosis) -> String {
    let mut lines = vec![format!("deep-ep {}", diagnosis.version)];
    let mut section = |title: &str, facts: Facts| {
        lines.push(String::new());
        lines.push(title.to_owned());
        let width = facts.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
        lines.extend(
            facts
                .into_iter()
                .map(|(name, value)| format!("  {name:width$}  {value}")),
        );
    };
    section("Processor", processor(diagnosis));
    section("Memory", memory(diagnosis));
    section("GPUs", diagnosis.gpu.facts());
    section(
        "Network",
        vec![("libfabric", or_none(&diagnosis.libfabric))],
    );
    section("Settings", settings(diagnosis));
    let engine = &diagnosis.engine;
    section(
        "Engine",
        vec![
            ("asked for", engine.asked_for.clone()),
            (
                "used",
                format!("{} ({})", engine.used.unwrap_or("none"), engine.why),
            ),
        ],
    );
    lines.push(String::new());
    if diagnosis.advice.is_empty() {
        lines.push("Nothing is missing.".into());
    } else {
        lines.push("What is missing, and what to do".into());
        for advice in &diagnosis.advice {
            lines.push(format!("  - {}:", advice.what));
            lines.push(format!("    {}", advice.todo));
        }
    }
    lines.join("\n")
}

fn or_none(value: &Option<String>) -> String {
    value.clone().unwrap_or_else(|| "not found".into())
}

fn processor(diagnosis: &Diagnosis) -> Facts {
    let cpu = &diagnosis.cpu;
    vec![
        (
            "model",
            cpu.model.clone().unwrap_or_else(|| "unknown".into()),
        ),
        ("cores", format!("{} usable of {}", cpu.usable, cpu.online)),
        ("SIMD", cpu.simd.join(" ")),
        ("codec and sums use", cpu.codec.into()),
    ]
}

fn memory(diagnosis: &Diagnosis) -> Facts {
    let memory = &diagnosis.memory;
    let limit = |limit: Option<u64>| limit.map_or("unlimited".into(), bytes);
    let pages = |setting: &Option<String>| setting.clone().unwrap_or_else(|| "none".into());
    let mut facts = vec![
        ("physical", bytes(memory.total)),
        ("this process may use", bytes(memory.limit)),
        ("can be had now", bytes(memory.obtainable)),
    ];
    for group in &memory.cgroups {
        let used = format!(
            "{} of {} used in {}",
            bytes(group.used),
            bytes(group.limit),
            group.path.display()
        );
        facts.push(("control group", used));
    }
    facts.extend([
        ("page", format!("{} bytes", memory.page)),
        ("huge pages, private", pages(&memory.huge_pages)),
        (
            "huge pages, shared",
            format!(
                "{} (used when granted, never needed)",
                pages(&memory.shared_huge_pages)
            ),
        ),
        ("address space", limit(memory.address_space)),
        ("locked memory", limit(memory.locked)),
    ]);
    facts
}

fn settings(diagnosis: &Diagnosis) -> Facts {
    let width = diagnosis
        .settings
        .iter()
        .map(|s| s.value.len())
        .max()
        .unwrap_or(0)
        .min(40);
    diagnosis
        .settings
        .iter()
        .map(|s| {
            let from = match s.from.as_str() {
                "default" => "default".to_owned(),
                from if from == s.name => "set in the environment".to_owned(),
                from => format!("from {from}"),
            };
            (s.name, format!("{:width$}  {from}", s.value))
        })
        .collect()
}
