//! Low-latency dispatch. The protocol is described in the engine's module.

use std::sync::Arc;

use super::{
    super::{
        announce::{Announcement, Terms, gather},
        copy::{self, RowUse, Store, store_fence},
        core::{Core, Counters, Member},
        rows::Rows,
    },
    DispatchHalf, Halves,
};
use crate::{
    buffer::{
        LowLatencyDispatchInput, LowLatencyDispatchOutput, LowLatencyHandle, RowFormat, SendPlan,
        pack_range,
    },
    codec::{self, SCALE_BLOCK, ScaleFormat},
    dtype::DType,
    engine::{LowLatencyDispatchCall, Operation},
    error::{Error, Result},
    routing::{ExpertMap, Routes},
    tensor::{OwnedTensor, Tensor, TensorMut},
};

const OPERATION: Operation = Operation::LowLatencyDispatch;

/// Scales per word in packed scales.
const PACKED: usize = 4;

/// A dispatch between its two halves.
struct InFlight {
    member: Arc<Member>,
    call: u64,
    own: Announcement,
    half: DispatchHalf,
}

/// What a row looks like on the wire.
#[derive(Debug, Clone, Copy)]
struct Wire {
    hidden: usize,
    format: RowFormat,
}

impl Wire {
    fn of(input: &LowLatencyDispatchInput<'_>) -> Self {
        Self {
            hidden: input.x.shape()[1],
            format: input.format,
        }
    }

    fn scales(&self) -> usize {
        self.hidden / SCALE_BLOCK
    }

    fn bytes(&self) -> usize {
        match self.format {
            RowFormat::Bf16 => self.hidden * 2,
            RowFormat::Fp8(_) => self.hidden + self.scales() * 4,
        }
    }

    fn code(&self) -> u64 {
        match self.format {
            RowFormat::Bf16 => 0,
            RowFormat::Fp8(ScaleFormat::F32) => 1,
            RowFormat::Fp8(ScaleFormat::PowerOfTwo) => 2,
            RowFormat::Fp8(ScaleFormat::Ue8m0) => 3,
        }
    }

    /// Type of a received row, and type and columns of its scales.
    fn output(&self) -> (DType, Option<(DType, usize)>) {
        match self.format {
            RowFormat::Bf16 => (DType::Bf16, None),
            RowFormat::Fp8(ScaleFormat::Ue8m0) => {
                (DType::F8E4M3, Some((DType::I32, self.scales() / PACKED)))
            }
            RowFormat::Fp8(_) => (DType::F8E4M3, Some((DType::F32, self.scales()))),
        }
    }
}

pub(in crate::engine::cpu) fn send(
    member: &Arc<Member>,
    input: &LowLatencyDispatchInput<'_>,
) -> Result<Box<dyn LowLatencyDispatchCall>> {
    let core = &member.core;
    let turn = core.begin(OPERATION)?;
    let (ranks, wire) = (core.group.ranks(), Wire::of(input));
    let top_k = input.topk_idx.shape()[1];
    let half = DispatchHalf::new(ranks, input.max_tokens_per_rank, top_k, wire.bytes());
    let prepared = Halves::new(core, turn.call, half.map(|half| half.bytes)).and_then(|halves| {
        let map = ExpertMap::new(input.num_experts, ranks)?;
        let mut routes = Routes::new();
        routes.rebuild(&input.topk_idx, &map)?;
        Ok((halves, map, SendPlan::new(routes)))
    });
    let (halves, map, plan) = match prepared {
        Ok(prepared) => prepared,
        Err(error) => return Err(turn.reject_for(error)),
    };
    let half = half.expect("the halves were found large enough for it");
    let mut own = Announcement::new(
        Terms {
            operation: OPERATION,
            num_experts: input.num_experts,
            row_bytes: wire.bytes(),
            top_k,
            scale_columns: 0,
            max_tokens: input.max_tokens_per_rank,
            format: wire.code(),
        },
        ranks,
    );
    own.tokens = input.x.shape()[0];
    own.rows = plan.rows();
    write_rows(core, &halves, &half, input, &map, &plan, wire);
    own.post(&core.group, turn.call);
    Ok(Box::new(InFlight {
        member: member.clone(),
        call: turn.call,
        own,
        half,
    }))
}

/// Writes headers and rows to the landing memory of every rank that is not masked.
fn write_rows(
    core: &Core,
    halves: &Halves<'_>,
    half: &DispatchHalf,
    input: &LowLatencyDispatchInput<'_>,
    map: &ExpertMap,
    plan: &SendPlan,
    wire: Wire,
) {
    let me = core.group.rank();
    let bytes = wire.bytes();
    let rows = Rows::of(&input.x);
    let masked: Vec<_> = (0..core.group.ranks())
        .map(|rank| core.group.is_masked(rank))
        .collect();
    let grain = (64 << 10) / bytes.max(1);
    core.workers.run(input.x.shape()[0], grain, None, |range| {
        let mut quantised = Quantised::new(wire);
        let mut header = vec![0i32; 1 + half.header / 4];
        let mut sent = 0;
        for token in range {
            let row = quantised.row(rows.row(token));
            for (rank, &slot) in plan.slots(token).iter().enumerate() {
                if slot < 0 || masked[rank] {
                    continue;
                }
                let len = fill_header(&mut header, token, &input.topk_idx, map, rank);
                let slot = slot as usize;
                let to_header = halves.at(rank, half.header_at(me, slot), half.header);
                let to_row = halves.at(rank, half.row_at(me, slot), bytes);
                // SAFETY: the slot is this rank's in this call; its receiver reads it only after
                // the announcement that follows.
                unsafe {
                    copy::copy(to_header, header.as_ptr().cast(), len, Store::Cached);
                    copy::copy(to_row, row.as_ptr(), bytes, Store::Cached);
                }
                sent += len + bytes;
            }
        }
        store_fence();
        Counters::add(&core.counters.wire, sent);
        Counters::add(&core.counters.rows, sent);
    });
}

/// A row in its wire format.
struct Quantised {
    wire: Wire,
    bytes: Vec<u8>,
    scales: Vec<f32>,
}

impl Quantised {
    fn new(wire: Wire) -> Self {
        let (bytes, scales) = match wire.format {
            RowFormat::Bf16 => (0, 0),
            RowFormat::Fp8(_) => (wire.bytes(), wire.scales()),
        };
        Self {
            wire,
            bytes: vec![0; bytes],
            scales: vec![0.0; scales],
        }
    }

    fn row<'a>(&'a mut self, x: &'a [u8]) -> &'a [u8] {
        let RowFormat::Fp8(format) = self.wire.format else {
            return x;
        };
        let (codes, scales) = self.bytes.split_at_mut(self.wire.hidden);
        codec::quantize_row(bytemuck::cast_slice(x), codes, &mut self.scales, format);
        scales.copy_from_slice(bytemuck::cast_slice(&self.scales));
        &self.bytes
    }
}

/// The source token and its distinct experts on `rank`; returns the bytes in use.
fn fill_header(
    header: &mut [i32],
    token: usize,
    topk_idx: &Tensor<'_>,
    map: &ExpertMap,
    rank: usize,
) -> usize {
    let k = topk_idx.shape()[1];
    header[0] = token as i32;
    let mut found = 0;
    let experts = map.experts_of(crate::Rank(rank));
    for j in 0..k {
        let id = match topk_idx.dtype() {
            DType::I64 => topk_idx.at::<i64>(token, j),
            _ => i64::from(topk_idx.at::<i32>(token, j)),
        };
        if id >= 0 && experts.contains(&(id as usize)) {
            let local = (id as usize - experts.start) as i32;
            if !header[1..=found].contains(&local) {
                found += 1;
                header[found] = local;
            }
        }
    }
    header[found + 1..=k].fill(-1);
    4 + 4 * k
}

/// A received row, and where it goes.
struct Arrival {
    source: usize,
    slot: usize,
    /// Local expert and row there, `first..first + experts` of the list of places.
    first: usize,
    experts: usize,
}

/// Where all received rows go.
struct Placed {
    arrivals: Vec<Arrival>,
    /// Local expert and row there.
    places: Vec<(u32, u32)>,
    recv_count: Vec<i32>,
    handle: LowLatencyHandle,
}

impl InFlight {
    fn wire(&self, input: &LowLatencyDispatchInput<'_>) -> Wire {
        Wire::of(input)
    }

    /// Reads the headers of all sources: which row goes where.
    fn place(&self, halves: &Halves<'_>, announced: &[Option<Announcement>]) -> Result<Placed> {
        let group = &self.member.core.group;
        let (ranks, me, tokens) = (group.ranks(), group.rank(), self.half.tokens);
        let local = self.own.terms.num_experts / ranks;
        let hidden = self.own.terms.row_bytes;
        let mut handle = LowLatencyHandle::empty(local, ranks, tokens, hidden)?;
        let (src_info, layout_range) = handle.tables_mut();
        let mut recv_count = vec![0i32; local];
        let mut arrivals = vec![];
        let mut places: Vec<(u32, u32)> = vec![];
        for (source, from) in announced.iter().enumerate() {
            let begin = recv_count.clone();
            let rows = from.as_ref().map_or(0, |from| from.rows[me] as usize);
            if rows > tokens {
                return Err(broken(
                    source,
                    format!("{rows} rows"),
                    format!("must be at most {tokens}"),
                ));
            }
            for slot in 0..rows {
                let header = self.header(halves, source, slot);
                let first = places.len();
                if header[0] as usize >= tokens {
                    return Err(broken(source, header[0], format!("must be below {tokens}")));
                }
                for &expert in header[1..].iter().take_while(|&&expert| expert >= 0) {
                    let Some(count) = recv_count.get_mut(expert as usize) else {
                        return Err(broken(source, expert, format!("must be below {local}")));
                    };
                    src_info[expert as usize * ranks * tokens + *count as usize] = header[0];
                    places.push((expert as u32, *count as u32));
                    *count += 1;
                }
                arrivals.push(Arrival {
                    source,
                    slot,
                    first,
                    experts: places.len() - first,
                });
            }
            for expert in 0..local {
                let count = recv_count[expert] - begin[expert];
                if count as usize > tokens {
                    return Err(broken(source, count, format!("must be at most {tokens}")));
                }
                layout_range[expert * ranks + source] =
                    pack_range(begin[expert] as usize, count as usize);
            }
        }
        Ok(Placed {
            arrivals,
            places,
            recv_count,
            handle,
        })
    }

    fn header<'a>(&self, halves: &Halves<'a>, source: usize, slot: usize) -> &'a [i32] {
        let len = 4 + 4 * self.own.terms.top_k;
        let at = halves.at(
            halves.core.group.rank(),
            self.half.header_at(source, slot),
            len,
        );
        // SAFETY: the source wrote the header before it announced, and leaves it alone until this
        // rank has finished the call.
        unsafe { std::slice::from_raw_parts(at.cast(), len / 4) }
    }

    fn receive(
        &self,
        input: &mut LowLatencyDispatchInput<'_>,
        out: &mut LowLatencyDispatchOutput<'_>,
    ) -> Result<(OwnedTensor, LowLatencyHandle)> {
        let core = &self.member.core;
        let stats = input.wait_stats.as_mut();
        let announced = gather(&core.group, self.call, &self.own, core.absent, stats)?;
        let halves = Halves::new(core, self.call, Some(self.half.bytes))?;
        let Placed {
            arrivals,
            places,
            recv_count,
            handle,
        } = self.place(&halves, &announced)?;
        let handle = handle.with_hidden(input.x.shape()[1]);
        self.copy_out(&halves, self.wire(input), &arrivals, &places, out);
        if let Some(stats) = &mut input.recv_stats {
            for (sum, &count) in stats.as_mut_slice::<i32>()?.iter_mut().zip(&recv_count) {
                *sum = sum.wrapping_add(count);
            }
        }
        let mut counts = OwnedTensor::zeros(DType::I32, &[recv_count.len()])?;
        counts.as_mut_slice()?.copy_from_slice(&recv_count);
        Ok((counts, handle))
    }

    fn copy_out(
        &self,
        halves: &Halves<'_>,
        wire: Wire,
        arrivals: &[Arrival],
        places: &[(u32, u32)],
        out: &mut LowLatencyDispatchOutput<'_>,
    ) {
        let core = &self.member.core;
        let me = core.group.rank();
        let bytes = wire.bytes();
        let row_bytes = if wire.format == RowFormat::Bf16 {
            bytes
        } else {
            wire.hidden
        };
        let cube = Cube::of(&mut out.x);
        let scales = out.scales.as_mut().map(Cube::of);
        let total = places.len() * row_bytes;
        let store = core.workers.store(row_bytes, total, RowUse::Output);
        let grain = (64 << 10) / bytes.max(1);
        core.workers.run(arrivals.len(), grain, None, |range| {
            let mut copied = 0;
            for arrival in &arrivals[range] {
                let at = halves.at(me, self.half.row_at(arrival.source, arrival.slot), bytes);
                // SAFETY: as for the header.
                let row = unsafe { std::slice::from_raw_parts(at, bytes) };
                for &(expert, position) in &places[arrival.first..][..arrival.experts] {
                    let to = cube.at(expert as usize, position as usize, 0);
                    // SAFETY: the place is this row's alone, inside the output.
                    unsafe { copy::copy(to, row.as_ptr(), row_bytes, store) };
                    if let Some(scales) = &scales {
                        let values = bytemuck::cast_slice(&row[wire.hidden..]);
                        write_scales(scales, wire, expert as usize, position as usize, values);
                    }
                    copied += bytes;
                }
            }
            store_fence();
            Counters::add(&core.counters.rows, copied);
        });
    }
}

fn broken(source: usize, value: impl std::fmt::Display, limit: String) -> Error {
    Error::invalid(format!("a message of rank {source}"), value, limit)
}

fn write_scales(to: &Cube, wire: Wire, expert: usize, position: usize, scales: &[f32]) {
    let write = |column: usize, bits: u32| {
        let at = to.at(expert, position, column).cast::<u32>();
        // SAFETY: the element is this row's alone, inside the output, 4 bytes wide and aligned.
        unsafe { at.write(bits) };
    };
    if wire.format == RowFormat::Fp8(ScaleFormat::Ue8m0) {
        for (column, scales) in scales.chunks_exact(PACKED).enumerate() {
            let mut word = [0];
            codec::pack_ue8m0(scales, &mut word);
            write(column, word[0] as u32);
        }
    } else {
        scales
            .iter()
            .enumerate()
            .for_each(|(column, scale)| write(column, scale.to_bits()));
    }
}

/// A three-dimensional output that several threads write, each its own elements.
struct Cube {
    base: *mut u8,
    shape: [usize; 3],
    /// In bytes.
    strides: [usize; 3],
}

// SAFETY: the threads write disjoint elements.
unsafe impl Sync for Cube {}

impl Cube {
    fn of(tensor: &mut TensorMut<'_>) -> Self {
        let size = tensor.dtype().size();
        let shape = tensor
            .shape()
            .try_into()
            .expect("outputs have three dimensions");
        let strides: [usize; 3] = tensor
            .strides()
            .try_into()
            .expect("outputs have three dimensions");
        Self {
            base: tensor.as_mut_ptr(),
            shape,
            strides: strides.map(|stride| stride * size),
        }
    }

    fn at(&self, i: usize, j: usize, k: usize) -> *mut u8 {
        assert!(i < self.shape[0] && j < self.shape[1] && k < self.shape[2]);
        self.base
            .wrapping_add(i * self.strides[0] + j * self.strides[1] + k * self.strides[2])
    }
}

impl LowLatencyDispatchCall for InFlight {
    fn allocate(
        &self,
        input: &LowLatencyDispatchInput<'_>,
    ) -> Result<(OwnedTensor, Option<OwnedTensor>)> {
        let ranks = self.member.core.group.ranks();
        let (local, rows) = (input.num_experts / ranks, ranks * input.max_tokens_per_rank);
        let (dtype, scales) = self.wire(input).output();
        let x = OwnedTensor::zeros(dtype, &[local, rows, input.x.shape()[1]])?;
        let scales = scales.map(|(dtype, columns)| {
            let column = rows.next_multiple_of(4);
            let strides = [columns * column, 1, column];
            OwnedTensor::zeros_strided(dtype, &[local, rows, columns], &strides)
        });
        Ok((x, scales.transpose()?))
    }

    fn finish_into(
        &mut self,
        input: &mut LowLatencyDispatchInput<'_>,
        out: &mut LowLatencyDispatchOutput<'_>,
    ) -> Result<(OwnedTensor, LowLatencyHandle)> {
        let core = self.member.core.clone();
        let turn = core.resume(OPERATION, self.call)?;
        let (x, scales) = self.wire(input).output();
        let checked =
            crate::buffer::check_low_latency_output(input, core.group.ranks(), out, x, scales);
        let done = checked
            .map_err(Error::from)
            .and_then(|()| self.receive(input, out));
        turn.finish(done)
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.member.core.abandon(self.call);
    }
}
