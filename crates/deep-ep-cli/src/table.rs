//! Tables for people.

use comfy_table::{Cell, CellAlignment, Table, presets::UTF8_FULL_CONDENSED};

use crate::{
    options::Mode,
    report::{JobReport, Memory, Operation},
};

/// A table whose columns after the first `left` are aligned to the right.
pub(crate) fn table(
    header: &[&str],
    left: usize,
    rows: impl Iterator<Item = Vec<String>>,
) -> Table {
    let mut table = Table::new();
    table.load_style(UTF8_FULL_CONDENSED).set_header(header);
    for row in rows {
        table.add_row(row.into_iter().map(Cell::new_owned));
    }
    for column in table.column_iter_mut().skip(left) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

/// The result of one job.
pub(crate) fn job(report: &JobReport) -> String {
    let mut text = format!(
        "{} {} on the {} engine: {} {}, {} tokens x {} hidden, top-{} of {} experts\n\
         input: {}; dispatched rows and combine's input: {}\n\n",
        report.mode,
        report.dtype,
        report.engine,
        report.ranks,
        report.launch,
        grouped(report.tokens as u64),
        report.hidden,
        report.top_k,
        report.experts,
        report.input,
        report.output,
    );
    text += &per_rank(report).to_string();
    text += &format!(
        "\nExpert load: min {}, mean {:.1}, max {} choices per expert\n\n",
        report.expert_load.min, report.expert_load.mean, report.expert_load.max
    );
    text += &operations(report).to_string();
    text += &format!(
        "\nTimes are the slowest rank's, over {} iterations after {} of warm-up. GB/s: bytes that all\n\
         ranks receive, own tokens included, over the median time.\n\n",
        report.iters, report.warmup
    );
    text += "Symmetric memory of each rank, by purpose the most at once:\n";
    text += &memory(report).to_string();
    text += "\n\n";
    text += &verdict(report);
    text
}

fn per_rank(report: &JobReport) -> Table {
    let (out, back) = (report.dispatch_row_bytes, report.combine_row_bytes);
    let header = [
        "rank",
        "tokens",
        "rows\nsent",
        "bytes\nsent",
        "rows\nreceived",
        "bytes\nreceived",
        "combine:\nbytes sent",
        "combine:\nreceived",
    ];
    let rows = (0..report.ranks).map(|rank| {
        let (sent, received) = (report.sent_rows[rank], report.received_rows[rank]);
        vec![
            rank.to_string(),
            grouped(report.tokens_per_rank[rank] as u64),
            grouped(sent as u64),
            bytes((sent * out) as u64),
            grouped(received as u64),
            bytes((received * out) as u64),
            bytes((received * back) as u64),
            bytes((sent * back) as u64),
        ]
    });
    table(&header, 0, rows)
}

fn operations(report: &JobReport) -> Table {
    // Low-latency rows go once per (token, rank) and are delivered once per (token, expert).
    let last = match report.mode {
        Mode::HighThroughput => "copies per\n(token, rank)",
        Mode::LowLatency => "bytes\nto peers",
    };
    let header = [
        "",
        "median",
        "minimum",
        "GB/s",
        "bytes\nreceived",
        "row bytes\ncopied",
        last,
    ];
    let row = |name: &str, operation: &Operation| {
        vec![
            name.to_owned(),
            micros(operation.median_us),
            micros(operation.min_us),
            format!("{:.2}", operation.gbps),
            bytes(operation.bytes),
            bytes(operation.copied.row_bytes),
            match report.mode {
                Mode::HighThroughput => format!("{:.2}", operation.copies_per_row),
                Mode::LowLatency => bytes(operation.copied.wire_bytes),
            },
        ]
    };
    let rows = [
        row("dispatch", &report.dispatch),
        row("combine", &report.combine),
    ];
    table(&header, 1, rows.into_iter())
}

/// A column for each purpose that any rank needed memory for.
fn memory(report: &JobReport) -> Table {
    let parts = |memory: &Memory| -> Vec<(String, u64)> {
        let all = memory.required_by_purpose.iter().chain(&memory.fixed);
        all.map(|p| (p.purpose.clone(), p.bytes)).collect()
    };
    let mut purposes: Vec<String> = Vec::new();
    for (purpose, bytes) in report.memory.iter().flat_map(parts) {
        if bytes > 0 && !purposes.contains(&purpose) {
            purposes.push(purpose);
        }
    }
    let mut header: Vec<String> = ["rank", "required", "committed", "reserved"]
        .map(String::from)
        .into();
    header.extend(
        purposes
            .iter()
            .map(|purpose| purpose.replacen(' ', "\n", 1)),
    );
    let header: Vec<&str> = header.iter().map(String::as_str).collect();
    let rows = report.memory.iter().enumerate().map(|(rank, memory)| {
        let parts = parts(memory);
        let part = |purpose: &String| parts.iter().find(|p| p.0 == *purpose).map_or(0, |p| p.1);
        let totals = [memory.required, memory.committed, memory.reserved].map(bytes);
        let mut row = vec![rank.to_string()];
        row.extend(totals);
        row.extend(purposes.iter().map(|purpose| bytes(part(purpose))));
        row
    });
    table(&header, 0, rows)
}

fn verdict(report: &JobReport) -> String {
    let Some(error) = report.max_abs_error else {
        return "Not verified: nothing was compared with the reference.".into();
    };
    if report.verified {
        let everything = "every received row, index, weight and count, and the combined result";
        return match report.mode {
            Mode::HighThroughput => format!("Verified: {everything}, bit for bit."),
            Mode::LowLatency => format!(
                "Verified: {everything},\nwhich is within the tolerance of low-latency sums (largest error {error:.2e})."
            ),
        };
    }
    format!(
        "NOT VERIFIED: results differ from the reference (largest error {error}):\n  {}",
        report.mismatches.join("\n  ")
    )
}

/// A parameter of a sweep: its name, whether it is a number, its value.
type Parameter = (&'static str, bool, fn(&JobReport) -> String);

const PARAMETERS: [Parameter; 13] = [
    ("mode", false, |r| r.mode.to_string()),
    ("dtype", false, |r| r.dtype.to_string()),
    ("outputs", false, |r| r.output.to_string()),
    ("launch", false, |r| r.launch.to_string()),
    ("ranks", true, |r| r.ranks.to_string()),
    ("tokens per rank", true, |r| {
        grouped((r.tokens / r.ranks) as u64)
    }),
    ("hidden", true, |r| r.hidden.to_string()),
    ("top-k", true, |r| r.top_k.to_string()),
    ("experts", true, |r| r.experts.to_string()),
    ("groups", true, |r| {
        r.workload
            .as_ref()
            .map_or(String::new(), |w| w.groups.to_string())
    }),
    ("top groups", true, |r| {
        r.workload
            .as_ref()
            .map_or(String::new(), |w| w.top_groups.to_string())
    }),
    ("skew", true, |r| {
        r.workload
            .as_ref()
            .map_or(String::new(), |w| w.skew.to_string())
    }),
    ("iterations", true, |r| r.iters.to_string()),
];

/// The results of a sweep, one line each: what all have in common above, the rest in columns.
pub(crate) fn sweep(reports: &[JobReport]) -> String {
    let (columns, common): (Vec<Parameter>, Vec<Parameter>) =
        PARAMETERS.into_iter().partition(|(_, _, value)| {
            reports
                .windows(2)
                .any(|pair| value(&pair[0]) != value(&pair[1]))
        });
    let mut text = String::new();
    if let Some(first) = reports.first() {
        let list: Vec<_> = common
            .iter()
            .map(|(name, _, value)| format!("{name} {}", value(first)))
            .collect();
        text = wrapped(&list) + "\n\n";
    }
    let names = columns.iter().map(|(name, ..)| name.replacen(' ', "\n", 1));
    let results = [
        "dispatch\nmedian",
        "minimum",
        "GB/s",
        "combine\nmedian",
        "minimum",
        "GB/s",
        "copies\nper row",
        "verified",
    ];
    let header: Vec<String> = names.chain(results.map(String::from)).collect();
    let header: Vec<&str> = header.iter().map(String::as_str).collect();
    let left = columns.iter().take_while(|(_, number, _)| !number).count();
    let rows = reports.iter().map(|r| {
        let mut row: Vec<String> = columns.iter().map(|(_, _, value)| value(r)).collect();
        row.extend([
            micros(r.dispatch.median_us),
            micros(r.dispatch.min_us),
            format!("{:.2}", r.dispatch.gbps),
            micros(r.combine.median_us),
            micros(r.combine.min_us),
            format!("{:.2}", r.combine.gbps),
            format!(
                "{:.2} {:.2}",
                r.dispatch.copies_per_row, r.combine.copies_per_row
            ),
            match (r.max_abs_error, r.verified) {
                (None, _) => "-",
                (_, true) => "yes",
                (_, false) => "NO",
            }
            .into(),
        ]);
        row
    });
    text += &table(&header, left, rows).to_string();
    text += "\nTimes are the slowest rank's. GB/s: bytes that all ranks receive, own tokens included, over the\n\
             median time. Copies: row bytes copied per row byte received, in dispatch and in combine.";
    for (n, report) in reports
        .iter()
        .enumerate()
        .filter(|(_, r)| !r.mismatches.is_empty())
    {
        text += &format!("\nline {}: {}", n + 1, report.mismatches.join("; "));
    }
    text
}

/// Items with commas, in lines of a usual width.
fn wrapped(items: &[String]) -> String {
    const WIDTH: usize = 90;
    let mut text = String::new();
    let mut line = 0;
    for (n, item) in items.iter().enumerate() {
        let separator = match n {
            0 => "",
            _ if line + item.len() > WIDTH => ",\n",
            _ => ", ",
        };
        line = if separator == ",\n" {
            item.len()
        } else {
            line + separator.len() + item.len()
        };
        text += separator;
        text += item;
    }
    text
}

/// `12,345`.
fn grouped(n: u64) -> String {
    let digits = n.to_string();
    let mut text = String::with_capacity(digits.len() * 4 / 3);
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// In decimal units, as GB/s are.
pub(crate) fn bytes(n: u64) -> String {
    const UNITS: [&str; 5] = ["kB", "MB", "GB", "TB", "PB"];
    if n < 1000 {
        return format!("{n} B");
    }
    let mut value = n as f64 / 1e3;
    let mut unit = 0;
    // What would be rounded to 1000 is 1 of the next unit.
    while value >= 999.5 && unit + 1 < UNITS.len() {
        value /= 1e3;
        unit += 1;
    }
    let digits = if value < 9.995 {
        2
    } else {
        usize::from(value < 99.95)
    };
    format!("{value:.digits$} {}", UNITS[unit])
}

fn micros(us: f64) -> String {
    match us {
        us if us >= 10_000.0 => format!("{:.2} ms", us / 1e3),
        us => format!("{us:.1} us"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_readable() {
        assert_eq!(
            [grouped(7), grouped(1234), grouped(1_234_567)],
            ["7", "1,234", "1,234,567"]
        );
        assert_eq!(
            [bytes(0), bytes(999), bytes(1536)],
            ["0 B", "999 B", "1.54 kB"]
        );
        assert_eq!([bytes(999_999), bytes(58_600_000)], ["1.00 MB", "58.6 MB"]);
        assert_eq!([micros(12.34), micros(18_700.0)], ["12.3 us", "18.70 ms"]);
    }
}
