//! `deep-ep bench --limit`: what memory and links of the GPUs can do at most.

use std::process::ExitCode;

use deep_ep::{
    Settings,
    cuda::limit::{Bandwidth, Config, Limit, Method, Path, measure},
};
use serde::Serialize;

use crate::{
    Failure,
    args::BenchArgs,
    output::{JsonLines, print},
    table::{bytes, table},
};

/// One JSON object. Speeds are in GB/s (10^9 bytes per second) per GPU, times in microseconds.
#[derive(Debug, Serialize)]
struct Report {
    gpus: Vec<String>,
    bytes_per_launch: u64,
    bandwidths: Vec<Line>,
    round_trip_local_us: f64,
    round_trip_link_us: Option<f64>,
    no_link: Option<String>,
}

#[derive(Debug, Serialize)]
struct Line {
    path: &'static str,
    method: &'static str,
    sms: Option<u32>,
    median: f64,
    minimum: f64,
    maximum: f64,
}

pub(crate) fn run(args: &BenchArgs) -> Result<ExitCode, Failure> {
    let mut json = JsonLines::open(args.common.json.as_deref()).map_err(Failure::Usage)?;
    // `main` has read the settings already, so that a bad one does not come this far.
    let settings = Settings::from_env().map_err(|error| Failure::Usage(error.into()))?;
    let mut config = Config::default();
    config.sms = args.sms.clone();
    let limit = measure(&settings, &config).map_err(|error| match error {
        deep_ep::Error::InvalidArgument(reject) => Failure::Usage(anyhow::anyhow!("--{reject}")),
        error => Failure::Job(error.into()),
    })?;
    let report = Report::new(&limit);
    json.write(&report)?;
    print(json.takes_stdout(), &report.text())?;
    Ok(ExitCode::SUCCESS)
}

impl Report {
    fn new(limit: &Limit) -> Self {
        let micros = |time: std::time::Duration| time.as_secs_f64() * 1e6;
        Self {
            gpus: limit.gpus.clone(),
            bytes_per_launch: limit.bytes,
            bandwidths: limit.bandwidths.iter().map(Line::new).collect(),
            round_trip_local_us: micros(limit.round_trip_local),
            round_trip_link_us: limit.round_trip_link.map(micros),
            no_link: limit.no_link.clone(),
        }
    }

    /// A line for each path and method, a column for each SM count.
    fn text(&self) -> String {
        let mut counts: Vec<u32> = Vec::new();
        let mut lines: Vec<(&str, &str)> = Vec::new();
        for line in &self.bandwidths {
            if !lines.contains(&(line.path, line.method)) {
                lines.push((line.path, line.method));
            }
            if let Some(sms) = line.sms
                && !counts.contains(&sms)
            {
                counts.push(sms);
            }
        }
        let mut header = vec!["path".to_owned(), "method".to_owned()];
        header.extend(counts.iter().map(|sms| format!("{sms} SMs")));
        header.push("no SM".into());
        let header: Vec<&str> = header.iter().map(String::as_str).collect();
        let columns: Vec<_> = counts.into_iter().map(Some).chain([None]).collect();
        let rows = lines.into_iter().map(|(path, method)| {
            let mut row = vec![path.to_owned(), method.to_owned()];
            row.extend(columns.iter().map(|sms| {
                let line = self
                    .bandwidths
                    .iter()
                    .find(|line| (line.path, line.method, &line.sms) == (path, method, sms));
                line.map_or(String::new(), |line| format!("{:.0}", line.median))
            }));
            row
        });
        let mut text = format!("{}\n\n", self.gpus.join(", "));
        text += &table(&header, 2, rows).to_string();
        text += &format!(
            "\nGB/s that each GPU copies, the slowest GPU's, median of 5 runs, {} per launch. Local copies read\n\
             and write the same memory, which moves twice that.\n\
             A flag to another SM and back: {:.2} us",
            bytes(self.bytes_per_launch),
            self.round_trip_local_us
        );
        match (&self.round_trip_link_us, &self.no_link) {
            (Some(time), _) => text += &format!("; to another GPU and back: {time:.2} us"),
            (None, Some(why)) => text += &format!("\nBetween GPUs: nothing, {why}"),
            (None, None) => {}
        }
        text
    }
}

impl Line {
    fn new(bandwidth: &Bandwidth) -> Self {
        let gigabytes = |bytes_per_second: f64| bytes_per_second / 1e9;
        let speeds = &bandwidth.bytes_per_second;
        Self {
            path: match bandwidth.path {
                Path::Local => "local",
                Path::OneWay => "one way",
                Path::BothWays => "both ways",
            },
            method: match bandwidth.method {
                Method::Store => "16-byte stores",
                Method::Bulk => "bulk stores (TMA)",
                Method::CopyEngine => "copy engine",
            },
            sms: bandwidth.sms,
            median: gigabytes(bandwidth.median()),
            minimum: gigabytes(speeds.first().copied().unwrap_or_default()),
            maximum: gigabytes(speeds.last().copied().unwrap_or_default()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_has_a_line_per_path_and_method() {
        let bandwidth = |path, method, sms, speed: f64| Bandwidth {
            path,
            method,
            sms,
            bytes_per_second: vec![speed * 0.5, speed, speed * 2.0],
        };
        let bandwidths = vec![
            bandwidth(Path::Local, Method::Store, Some(8), 381e9),
            bandwidth(Path::Local, Method::Store, Some(64), 1850e9),
            bandwidth(Path::BothWays, Method::CopyEngine, None, 311e9),
        ];
        let mut limit = Limit {
            gpus: vec!["a GPU".into(), "another".into()],
            bytes: 1_000_000,
            bandwidths,
            round_trip_local: std::time::Duration::from_nanos(1500),
            round_trip_link: Some(std::time::Duration::from_nanos(2500)),
            no_link: None,
        };
        let text = Report::new(&limit).text();
        let line = |word: &str| text.lines().find(|line| line.contains(word)).unwrap();
        assert!(line("16-byte").contains("381") && line("16-byte").contains("1850"));
        assert!(line("copy engine").contains("311"));
        assert!(
            text.contains("1.50 us; to another GPU and back: 2.50 us"),
            "{text}"
        );
        limit.round_trip_link = None;
        limit.no_link = Some("one GPU".into());
        assert!(
            Report::new(&limit)
                .text()
                .ends_with("Between GPUs: nothing, one GPU")
        );
    }
}
