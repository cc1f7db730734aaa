//! Hosts that wait for a dispatch's counts, and make room.

use std::{
    sync::{Arc, atomic::Ordering},
    time::Instant,
};

use super::{InFlight, handle::HandleParts, tell};
use crate::{
    buffer::ReceivedCounts,
    engine::{
        Operation,
        cuda::engine::{
            failures::Concluded,
            params::{result_word, verdict},
        },
    },
    error::{Error, Result},
    memory::heap::Purpose,
};

impl InFlight {
    /// Waits for the counts; makes room and calls again if rows do not fit somewhere.
    pub(super) fn wait_counts(&mut self) -> Result<&ReceivedCounts> {
        while self.counts.is_none() {
            self.core.check_current(self.number, Operation::Dispatch)?;
            let (verdict, counts) = self.wait_result()?;
            if verdict == verdict::OK {
                self.core.saw_rows(counts.rows.unwrap_or(0));
                self.counts = Some(counts);
                break;
            }
            self.grow(counts.rows.unwrap_or(0))?;
        }
        Ok(self.counts.as_ref().expect("just counted"))
    }

    /// Ends the call that did not fit, and makes another with enough room.
    fn grow(&mut self, rows: usize) -> Result<()> {
        self.give_up()?;
        self.progress = Arc::default();
        if rows > self.params.capacity as usize {
            let purpose = match self.fused {
                true => Purpose::DispatchLoan,
                false => Purpose::DispatchStaging,
            };
            let core = Arc::clone(&self.core);
            let bytes = self.layout.bytes(rows);
            // All ranks call again; one that cannot tells the others.
            let tells = |error: &Error| tell(&core, error);
            let landing = core.block(bytes, purpose).inspect_err(tells)?;
            if let Some(handle) = &mut self.handle {
                *handle = HandleParts::new(&core, handle.tokens, rows).inspect_err(tells)?;
                handle.describe(&mut self.params);
            }
            self.landing = Arc::new(landing);
            self.place(rows);
        }
        self.launch_send()
    }

    /// Polls the words that the kernel writes for the host.
    fn wait_result(&self) -> Result<(u32, ReceivedCounts)> {
        let ranks = self.core.ranks;
        let start = Instant::now();
        let words = self.core.results.words();
        let read = |at: usize| -> Result<u32> {
            let mut polls = 0u32;
            loop {
                let word = words[at].load(Ordering::Acquire);
                if (word >> 32) as u32 == self.params.ticket {
                    return Ok(word as u32);
                }
                polls = polls.wrapping_add(1);
                if polls.is_multiple_of(1024) {
                    self.core.failures.check_failed()?;
                    let stream = if self.beside() {
                        &self.core.side
                    } else {
                        &self.on.stream
                    };
                    self.core.check_stuck(stream, start)?;
                    if polls > 1 << 16 {
                        std::thread::yield_now();
                    }
                }
                std::hint::spin_loop();
            }
        };
        let found = read(result_word::VERDICT)?;
        if found != verdict::OK && found != verdict::GROW {
            let number = |at: usize| -> Result<u64> {
                Ok(u64::from(read(at)?) | u64::from(read(at + 1)?) << 32)
            };
            return Err(self.core.failures.concluded(Concluded {
                operation: Operation::Dispatch as u32,
                verdict: found,
                rank: read(result_word::RANK)?,
                status: read(result_word::STATUS)?,
                detail: [
                    number(result_word::DETAIL)?,
                    number(result_word::DETAIL + 2)?,
                ],
                num_experts: self.params.experts as usize,
            }));
        }
        let rows_from = (0..ranks)
            .map(|rank| Ok(read(result_word::ROWS + rank)? as usize))
            .collect::<Result<Vec<_>>>()?;
        let local = match self.handle {
            Some(_) => self.params.experts as usize / ranks,
            None => 0,
        };
        let tokens_per_expert = (0..local)
            .map(|expert| {
                let count = read(result_word::ROWS + 3 * ranks + expert)? as usize;
                Ok(count.next_multiple_of(self.expert_alignment))
            })
            .collect::<Result<Vec<_>>>()?;
        let rows = rows_from.iter().sum();
        Ok((
            found,
            ReceivedCounts {
                rows: Some(rows),
                output_rows: rows,
                rows_from,
                tokens_per_expert,
            },
        ))
    }

    /// What a caller is told who does not wait.
    pub(super) fn worst_counts(&self, rows: usize) -> ReceivedCounts {
        ReceivedCounts {
            rows: None,
            output_rows: rows,
            rows_from: vec![],
            tokens_per_expert: vec![],
        }
    }

    pub(super) fn known_counts(&mut self) -> Result<ReceivedCounts> {
        self.core.check_current(self.number, Operation::Dispatch)?;
        match self.worst {
            Some(rows) => Ok(self.worst_counts(rows)),
            None => self.wait_counts().cloned(),
        }
    }
}
