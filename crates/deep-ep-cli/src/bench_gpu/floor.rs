//! The least time that an operation can take: the bytes that must cross a link over its speed.

use deep_ep::cuda::limit::{Bandwidth, Limit, Method, Path};

/// The links of this host, all busy in both directions.
pub(crate) struct Link {
    /// Bytes per second and GPU; `None` if there is no link.
    pub(crate) speed: Option<f64>,
    how: String,
}

impl Link {
    /// The best method and SM count.
    pub(crate) fn new(limit: &Limit) -> Self {
        let best = limit
            .bandwidths
            .iter()
            .filter(|bandwidth| bandwidth.path == Path::BothWays)
            .max_by(|a, b| a.median().total_cmp(&b.median()));
        match best {
            Some(best) => Self {
                speed: Some(best.median()),
                how: how(best),
            },
            None => Self {
                speed: None,
                how: limit.no_link.clone().unwrap_or_default(),
            },
        }
    }

    pub(crate) fn text(&self) -> String {
        match self.speed {
            Some(speed) => format!(
                "Links, both directions busy: {:.0} GB/s per GPU and direction ({})",
                speed / 1e9,
                self.how
            ),
            None => format!("No links between GPUs: {}", self.how),
        }
    }

    /// Microseconds for `bytes` through one GPU's link; `None` if there is none, or nothing crosses.
    pub(crate) fn floor_us(&self, bytes: u64) -> Option<f64> {
        let speed = self.speed.filter(|&speed| speed > 0.0)?;
        (bytes > 0).then(|| bytes as f64 / speed * 1e6)
    }
}

fn how(best: &Bandwidth) -> String {
    let method = match best.method {
        Method::Store => "16-byte stores",
        Method::Bulk => "bulk stores",
        Method::CopyEngine => "copy engines",
    };
    match best.sms {
        Some(sms) => format!("{method} with {sms} SMs"),
        None => method.into(),
    }
}

/// Rows that cross the busiest link in its busier direction, when rank `s` sends `sent[s][d]` rows
/// to rank `d` and ranks are spread over `gpus` in turn. Rows between ranks of one GPU cross none.
pub(crate) fn rows_over_link(sent: &[Vec<u64>], gpus: usize) -> u64 {
    let gpus = gpus.max(1);
    let (mut out, mut back) = (vec![0; gpus], vec![0; gpus]);
    for (source, rows) in sent.iter().enumerate() {
        for (to, rows) in rows.iter().enumerate() {
            if source % gpus != to % gpus {
                out[source % gpus] += rows;
                back[to % gpus] += rows;
            }
        }
    }
    out.into_iter().chain(back).max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_within_a_gpu_cross_no_link() {
        let sent = vec![vec![10, 7, 3], vec![1, 10, 2], vec![5, 4, 10]];
        // Ranks 0 and 2 are on GPU 0: to rank 1 go 7 + 4 rows, from it come 1 + 2.
        assert_eq!(rows_over_link(&sent, 2), 11);
        assert_eq!(rows_over_link(&sent, 1), 0);
        // Rank 1 gets 11 rows and sends 3, rank 0 sends 10 and gets 6.
        assert_eq!(rows_over_link(&sent, 3), 11);
    }

    #[test]
    fn a_floor_needs_a_link_and_bytes() {
        let link = Link {
            speed: Some(300e9),
            how: String::new(),
        };
        assert_eq!(link.floor_us(3_000_000), Some(10.0));
        assert_eq!(link.floor_us(0), None);
        let none = Link {
            speed: None,
            how: "one GPU".into(),
        };
        assert_eq!(none.floor_us(1), None);
    }
}
