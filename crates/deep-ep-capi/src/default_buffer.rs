//! The buffer that nobody passes: one for the process, made from the launcher's environment.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use deep_ep::{BufferConfig, Communicator, Error, LowLatencyConfig, Result};

use crate::{
    boundary,
    buffer::{BufferObject, BufferSettings},
    objects,
    pointers::{self, Out},
    status::Status,
};

/// The buffer, and what low-latency exchanges on it may hold.
pub(crate) struct DefaultBuffer {
    pub(crate) buffer: Arc<BufferObject>,
    /// The capacity that it was configured with.
    pub(crate) low_latency: Option<LowLatencyConfig>,
    /// What C holds it by.
    held: Held,
}

/// A pointer that C has, as a number.
struct Held(usize);

#[derive(Default)]
struct State {
    buffer: Option<Arc<DefaultBuffer>>,
    /// Bound on SMs, 0 for none; may be set before the buffer is made.
    num_sms: usize,
}

static STATE: Mutex<State> = Mutex::new(State {
    buffer: None,
    num_sms: 0,
});

fn state() -> MutexGuard<'static, State> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Room for `deep_ep_low_latency_all_to_all()`: as many rows for each rank as a rank may have tokens, each
/// of two bf16 for an fp32, besides what was asked for.
fn with_room(config: BufferConfig, ranks: usize) -> Result<BufferConfig> {
    let Some(asked) = config.low_latency else {
        return Ok(config);
    };
    let exchange = exchange_capacity(&asked, ranks)?;
    let bytes = asked.bytes(ranks)?.max(exchange.bytes(ranks)?);
    let room = LowLatencyConfig {
        exact_top_k: asked.exact_top_k,
        ..LowLatencyConfig::from_bytes(ranks, bytes)?
    };
    // What was asked for is kept where it is enough: messages about it are clearer.
    let low_latency = if asked.bytes(ranks)? >= bytes {
        asked
    } else {
        room
    };
    Ok(BufferConfig {
        low_latency: Some(low_latency),
        ..config
    })
}

/// Capacity of an exchange of `M` rows of `H` fp32 for each rank: every rank has one expert.
pub(crate) fn exchange_capacity(
    asked: &LowLatencyConfig,
    ranks: usize,
) -> Result<LowLatencyConfig> {
    let tokens = asked.max_tokens_per_rank.checked_mul(ranks);
    let hidden = asked.hidden.checked_mul(2);
    let (Some(max_tokens_per_rank), Some(hidden)) = (tokens, hidden) else {
        let limit = "must need fewer than 2^62 bytes of landing memory";
        return Err(Error::invalid("low_latency", format!("{asked:?}"), limit));
    };
    Ok(LowLatencyConfig {
        max_tokens_per_rank,
        hidden,
        num_experts: ranks,
        exact_top_k: None,
    })
}

fn make(settings: Result<BufferSettings>) -> Result<DefaultBuffer> {
    let communicator = Communicator::from_env()?;
    let ranks = communicator.size();
    let asked = settings.and_then(|settings| settings.config(ranks));
    let low_latency = asked.as_ref().ok().and_then(|config| config.low_latency);
    let config = asked.and_then(|config| with_room(config, ranks));
    let buffer = Arc::new(BufferObject::new(&communicator, config)?);
    let held = Held(objects::give_shared(buffer.clone()).addr());
    Ok(DefaultBuffer {
        buffer,
        low_latency,
        held,
    })
}

impl State {
    fn keep(&mut self, made: DefaultBuffer) -> Arc<DefaultBuffer> {
        made.buffer.set_num_sms(self.num_sms);
        self.buffer.insert(Arc::new(made)).clone()
    }
}

/// The default buffer, made now if there is none.
pub(crate) fn get() -> Result<Arc<DefaultBuffer>> {
    let mut state = state();
    if let Some(buffer) = &state.buffer {
        return Ok(buffer.clone());
    }
    let made = make(Ok(BufferSettings::defaults()))?;
    Ok(state.keep(made))
}

/// Makes the default buffer from the launcher's environment (see `deep_ep_communicator_from_env()`).
/// `config` was made by `deep_ep_buffer_config()`; NULL: defaults. For
/// `deep_ep_low_latency_all_to_all()` its `low_latency` must say how many rows for each rank
/// (`num_max_dispatch_tokens_per_rank`) of how many fp32 (`hidden`) there will be. Collective. An error
/// if there is a default buffer. Any thread; others wait.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn deep_ep_init(config: *const BufferSettings) -> Status {
    boundary::call(|| {
        let mut state = state();
        if state.buffer.is_some() {
            let limit = "must not exist: call deep_ep_finalize() first";
            return Err(Error::invalid("the default buffer", "there", limit));
        }
        let settings = pointers::read_optional(config, "config");
        let made = make(settings.map(|given| given.unwrap_or_else(BufferSettings::defaults)))?;
        state.keep(made);
        Ok(())
    })
}

/// Frees the default buffer, if there is one; a later use makes another one. Calls that run on it are
/// completed. Any thread.
#[unsafe(no_mangle)]
pub extern "C" fn deep_ep_finalize() -> Status {
    boundary::call(|| {
        let taken = state().buffer.take();
        if let Some(taken) = taken {
            let pointer = std::ptr::without_provenance_mut::<BufferObject>(taken.held.0);
            objects::take(pointer, "the default buffer")?;
        }
        Ok(())
    })
}

/// The default buffer, made now if there is none, for all other calls; it is the library's, good until
/// `deep_ep_finalize()`. Collective if there is none. Any thread; others wait.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn deep_ep_default_buffer(buffer: *mut *mut BufferObject) -> Status {
    boundary::call(|| {
        let out = Out::new(buffer, "buffer")?;
        out.set(std::ptr::without_provenance_mut(get()?.held.0));
        Ok(())
    })
}

/// Bounds the SMs, on the CPU engine the threads, of high-throughput calls on the default buffer. Local;
/// before the buffer is made, too. Any thread, any time.
#[unsafe(no_mangle)]
pub extern "C" fn deep_ep_set_sm_limit(num_sms: usize) -> Status {
    boundary::call(|| {
        if num_sms == 0 {
            return Err(Error::invalid("num_sms", 0, "must be at least 1"));
        }
        let mut state = state();
        state.num_sms = num_sms;
        if let Some(default) = &state.buffer {
            default.buffer.set_num_sms(num_sms);
        }
        Ok(())
    })
}
