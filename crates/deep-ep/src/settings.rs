//! Every environment variable this library reads, in one place.
//!
//! A value remembers where it came from ([`Origin`]), so that `deep-ep doctor` can print the
//! settings and what to change. Values are checked when they are read: a bad one is an
//! [`Error::InvalidArgument`] that names the variable, its value and the limit.

use std::{
    ffi::{OsStr, OsString},
    fmt,
    path::PathBuf,
    str::FromStr,
    time::Duration,
};

use crate::error::{Error, Result, Text};

/// The deadline of waits on the host, unless `DEEP_EP_TIMEOUT_SECS` says otherwise.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(300);

/// The port of the rendezvous, unless a variable says otherwise.
pub const DEFAULT_PORT: u16 = 8361;

/// The most ranks a job may have.
pub const MAX_RANKS: usize = 65_536;

/// The longest deadline that can be set: a year.
const MAX_TIMEOUT_SECS: f64 = 365.0 * 86_400.0;

/// Where a value came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    /// Nobody set it.
    Default,
    /// The environment variable of this name, which need not be the setting's own: the default
    /// cache folder follows `HOME`, the port follows `MASTER_PORT`.
    Env(&'static str),
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("default"),
            Self::Env(name) => f.write_str(name),
        }
    }
}

/// A value and where it came from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Setting<T> {
    /// The value.
    pub value: T,
    /// Where it came from.
    pub origin: Origin,
}

/// Which engine moves the rows (`DEEP_EP_ENGINE`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum EngineChoice {
    /// `auto`: CUDA where a GPU and its driver are found, else the CPU.
    #[default]
    Auto,
    /// `cpu`.
    Cpu,
    /// `cuda`.
    Cuda,
}

impl fmt::Display for EngineChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::Cpu => "cpu",
            Self::Cuda => "cuda",
        })
    }
}

impl FromStr for EngineChoice {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "auto" => Ok(Self::Auto),
            "cpu" => Ok(Self::Cpu),
            "cuda" => Ok(Self::Cuda),
            _ => Err(Error::invalid("engine", text, "must be auto, cpu or cuda")),
        }
    }
}

/// A secret that the ranks of a job share. Neither `Debug` nor `Display` shows it.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(Vec<u8>);

impl Secret {
    /// The longest secret, in bytes.
    pub const MAX_BYTES: usize = 1024;

    /// A secret of these bytes.
    ///
    /// Whoever can reach the port and knows the secret can take part in the job, and a secret that
    /// can be guessed can also be found from a recorded handshake: use random bytes, for example
    /// `openssl rand -hex 16`.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] if it is empty or longer than [`Secret::MAX_BYTES`].
    pub fn new(bytes: impl Into<Vec<u8>>) -> Result<Self> {
        let bytes = bytes.into();
        if bytes.is_empty() || bytes.len() > Self::MAX_BYTES {
            return Err(Error::invalid(
                "secret",
                format_args!("{} bytes long", bytes.len()),
                "must have 1 to 1024 bytes",
            ));
        }
        Ok(Self(bytes))
    }

    /// The bytes, for the code that computes with them.
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(hidden)")
    }
}

/// All settings that come from the environment.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Settings {
    /// `DEEP_EP_ENGINE`: `auto` (default), `cpu` or `cuda`.
    pub engine: Setting<EngineChoice>,
    /// `DEEP_EP_CACHE_DIR`: where compiled kernels are kept. Default: `EP_JIT_CACHE_DIR` (DeepEP's
    /// own name for it), or `deep-ep` in `XDG_CACHE_HOME`, or in `.cache` of `HOME`; none if neither is set.
    pub cache_dir: Setting<Option<PathBuf>>,
    /// `DEEP_EP_NVRTC`: the NVRTC library to load. Default: searched for.
    pub nvrtc: Setting<Option<PathBuf>>,
    /// `DEEP_EP_SPLIT_LAUNCHES`: 1 makes every part of a call on a GPU a launch of its own, for
    /// compute-sanitizer; see
    /// [`BufferConfig::split_launches`](crate::BufferConfig::split_launches).
    pub split_launches: Setting<bool>,
    /// `DEEP_EP_TIMEOUT_SECS`: the deadline of every wait on the host, in seconds, fractions
    /// allowed. Default: 300.
    pub timeout: Setting<Duration>,
    /// `DEEP_EP_LOG`: which log lines the programs print, as a `tracing` filter. Default: `warn`.
    pub log: Setting<String>,
    /// `DEEP_EP_SECRET`: the secret that the ranks of a job share. Default: one that rank 0 makes
    /// up, if all ranks are on one host.
    pub secret: Setting<Option<Secret>>,
    /// `RANK`: this process among all. Default: 0.
    pub rank: Setting<usize>,
    /// `WORLD_SIZE`: the number of processes. Default: 1.
    pub world_size: Setting<usize>,
    /// `LOCAL_RANK`: this process among those of its host. Default: `RANK` modulo
    /// `LOCAL_WORLD_SIZE`.
    pub local_rank: Setting<usize>,
    /// `LOCAL_WORLD_SIZE`: the number of processes on this host. Default: not known.
    pub local_world_size: Setting<Option<usize>>,
    /// `MASTER_ADDR`: the host of rank 0, a name or an address. Default: 127.0.0.1.
    pub master_addr: Setting<String>,
    /// `DEEP_EP_PORT`: the port on which rank 0 listens until all ranks have come. Default:
    /// `MASTER_PORT`, or the port after it where torchrun's agent serves its own store on
    /// `MASTER_PORT` (it says so in `TORCHELASTIC_USE_AGENT_STORE`); 8361 without `MASTER_PORT`.
    pub port: Setting<u16>,
}

/// One line of [`Settings::iter`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Described {
    /// The environment variable that sets it.
    pub name: &'static str,
    /// The value in effect. A secret is only ever `hidden` or `not set`.
    pub value: String,
    /// Where it came from.
    pub origin: Origin,
}

impl Settings {
    /// Reads the process environment.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] naming the variable, its value and the limit it breaks.
    pub fn from_env() -> Result<Self> {
        Self::from_lookup(|name| std::env::var_os(name))
    }

    /// Reads variables with `lookup`, which gives the value of a name if it is set.
    ///
    /// # Errors
    ///
    /// As [`Settings::from_env`].
    pub fn from_lookup(lookup: impl Fn(&str) -> Option<OsString>) -> Result<Self> {
        let env = Reader { lookup };
        let world_size = env.integer("WORLD_SIZE", 1, MAX_RANKS)?;
        let rank = env.integer("RANK", 0, MAX_RANKS - 1)?;
        let local_world_size = env.integer("LOCAL_WORLD_SIZE", 1, MAX_RANKS)?;
        let local_rank = env.integer("LOCAL_RANK", 0, MAX_RANKS - 1)?;
        let size = world_size.unwrap_or(1);
        below("RANK", rank, "WORLD_SIZE", Some(size))?;
        below(
            "LOCAL_RANK",
            local_rank,
            "LOCAL_WORLD_SIZE",
            local_world_size,
        )?;
        if local_world_size.is_some_and(|local| local > size) {
            return Err(Error::invalid(
                "LOCAL_WORLD_SIZE",
                local_world_size.unwrap_or_default(),
                format!("must be at most WORLD_SIZE = {size}"),
            ));
        }
        let local_default = match local_world_size {
            Some(local) => rank.unwrap_or(0) % local,
            None => rank.unwrap_or(0),
        };
        Ok(Self {
            engine: env.engine()?,
            cache_dir: env.cache_dir(),
            nvrtc: setting("DEEP_EP_NVRTC", env.path("DEEP_EP_NVRTC").map(Some), None),
            split_launches: env.switch("DEEP_EP_SPLIT_LAUNCHES")?,
            timeout: env.timeout()?,
            log: setting("DEEP_EP_LOG", env.text("DEEP_EP_LOG")?, "warn".into()),
            secret: env.secret()?,
            rank: setting("RANK", rank, 0),
            world_size: setting("WORLD_SIZE", world_size, 1),
            local_rank: setting("LOCAL_RANK", local_rank, local_default),
            local_world_size: setting("LOCAL_WORLD_SIZE", local_world_size.map(Some), None),
            master_addr: setting("MASTER_ADDR", env.text("MASTER_ADDR")?, "127.0.0.1".into()),
            port: env.port()?,
        })
    }

    /// The deadline of waits alone, for callers that need no other variable.
    ///
    /// # Errors
    ///
    /// As [`Settings::from_env`], for `DEEP_EP_TIMEOUT_SECS` only.
    pub(crate) fn timeout_from_env() -> Result<Duration> {
        let env = Reader {
            lookup: |name: &str| std::env::var_os(name),
        };
        Ok(env.timeout()?.value)
    }

    /// Whether the launcher says that all ranks are on this host.
    pub fn single_host(&self) -> bool {
        self.local_world_size.value == Some(self.world_size.value)
    }

    /// Every setting with its value and origin, in a fixed order. The secret is not shown.
    pub fn iter(&self) -> impl Iterator<Item = Described> {
        let path = |path: &Option<PathBuf>| match path {
            Some(path) => path.display().to_string(),
            None => "not set".into(),
        };
        let secret = match self.secret.value {
            Some(_) => "hidden",
            None => "not set",
        };
        let local_world_size = match self.local_world_size.value {
            Some(size) => size.to_string(),
            None => "not set".into(),
        };
        [
            line(
                "DEEP_EP_ENGINE",
                &self.engine,
                self.engine.value.to_string(),
            ),
            line(
                "DEEP_EP_CACHE_DIR",
                &self.cache_dir,
                path(&self.cache_dir.value),
            ),
            line("DEEP_EP_NVRTC", &self.nvrtc, path(&self.nvrtc.value)),
            line(
                "DEEP_EP_SPLIT_LAUNCHES",
                &self.split_launches,
                u8::from(self.split_launches.value).to_string(),
            ),
            line(
                "DEEP_EP_TIMEOUT_SECS",
                &self.timeout,
                self.timeout.value.as_secs_f64().to_string(),
            ),
            line("DEEP_EP_LOG", &self.log, self.log.value.clone()),
            line("DEEP_EP_SECRET", &self.secret, secret.into()),
            line("RANK", &self.rank, self.rank.value.to_string()),
            line(
                "WORLD_SIZE",
                &self.world_size,
                self.world_size.value.to_string(),
            ),
            line(
                "LOCAL_RANK",
                &self.local_rank,
                self.local_rank.value.to_string(),
            ),
            line("LOCAL_WORLD_SIZE", &self.local_world_size, local_world_size),
            line(
                "MASTER_ADDR",
                &self.master_addr,
                self.master_addr.value.clone(),
            ),
            line("DEEP_EP_PORT", &self.port, self.port.value.to_string()),
        ]
        .into_iter()
    }
}

fn line<T>(name: &'static str, setting: &Setting<T>, value: String) -> Described {
    Described {
        name,
        value,
        origin: setting.origin,
    }
}

fn setting<T>(name: &'static str, found: Option<T>, default: T) -> Setting<T> {
    match found {
        Some(value) => Setting {
            value,
            origin: Origin::Env(name),
        },
        None => Setting {
            value: default,
            origin: Origin::Default,
        },
    }
}

/// `value`, if both are known, must be below `limit`.
fn below(
    name: &'static str,
    value: Option<usize>,
    limit_name: &str,
    limit: Option<usize>,
) -> Result<()> {
    match (value, limit) {
        (Some(value), Some(limit)) if value >= limit => Err(Error::invalid(
            name,
            value,
            format!("must be below {limit_name} = {limit}"),
        )),
        _ => Ok(()),
    }
}

/// Reads and checks single variables.
struct Reader<F> {
    lookup: F,
}

impl<F: Fn(&str) -> Option<OsString>> Reader<F> {
    /// An empty variable counts as not set, as launchers and shells often leave it so.
    fn raw(&self, name: &str) -> Option<OsString> {
        (self.lookup)(name).filter(|value| !value.is_empty())
    }

    fn text(&self, name: &'static str) -> Result<Option<String>> {
        self.raw(name)
            .map(|value| {
                value.into_string().map_err(|value| {
                    Error::invalid(name, OsStr::display(&value), "must be valid UTF-8")
                })
            })
            .transpose()
    }

    fn path(&self, name: &str) -> Option<PathBuf> {
        self.raw(name).map(PathBuf::from)
    }

    fn integer(&self, name: &'static str, min: usize, max: usize) -> Result<Option<usize>> {
        let Some(text) = self.text(name)? else {
            return Ok(None);
        };
        match text.trim().parse() {
            Ok(value) if (min..=max).contains(&value) => Ok(Some(value)),
            _ => Err(Error::invalid(
                name,
                quoted(&text),
                format!("must be an integer of {min} to {max}"),
            )),
        }
    }

    fn engine(&self) -> Result<Setting<EngineChoice>> {
        const NAME: &str = "DEEP_EP_ENGINE";
        let found = self
            .text(NAME)?
            .map(|text| {
                text.trim()
                    .parse()
                    .map_err(|_| Error::invalid(NAME, quoted(&text), "must be auto, cpu or cuda"))
            })
            .transpose()?;
        Ok(setting(NAME, found, EngineChoice::Auto))
    }

    fn cache_dir(&self) -> Setting<Option<PathBuf>> {
        for (name, below) in [
            ("DEEP_EP_CACHE_DIR", ""),
            ("EP_JIT_CACHE_DIR", ""),
            ("XDG_CACHE_HOME", "deep-ep"),
            ("HOME", ".cache/deep-ep"),
        ] {
            if let Some(path) = self.path(name) {
                let path = if below.is_empty() {
                    path
                } else {
                    path.join(below)
                };
                return setting(name, Some(Some(path)), None);
            }
        }
        setting("DEEP_EP_CACHE_DIR", None, None)
    }

    fn switch(&self, name: &'static str) -> Result<Setting<bool>> {
        let found = self
            .text(name)?
            .map(|text| match text.trim() {
                "0" => Ok(false),
                "1" => Ok(true),
                _ => Err(Error::invalid(name, quoted(&text), "must be 0 or 1")),
            })
            .transpose()?;
        Ok(setting(name, found, false))
    }

    fn timeout(&self) -> Result<Setting<Duration>> {
        const NAME: &str = "DEEP_EP_TIMEOUT_SECS";
        let found = self
            .text(NAME)?
            .map(|text| match text.trim().parse::<f64>() {
                // A value that rounds to no time at all is no deadline either.
                Ok(secs) if (1e-3..=MAX_TIMEOUT_SECS).contains(&secs) => {
                    Ok(Duration::from_secs_f64(secs))
                }
                _ => Err(Error::invalid(
                    NAME,
                    quoted(&text),
                    "must be a number of seconds, at least 0.001 and at most 31536000",
                )),
            })
            .transpose()?;
        Ok(setting(NAME, found, DEFAULT_TIMEOUT))
    }

    fn secret(&self) -> Result<Setting<Option<Secret>>> {
        use std::os::unix::ffi::OsStringExt;
        const NAME: &str = "DEEP_EP_SECRET";
        let found = self
            .raw(NAME)
            .map(|bytes| {
                let bytes = bytes.into_vec();
                let length = bytes.len();
                Secret::new(bytes).map_err(|_| {
                    Error::invalid(
                        NAME,
                        format_args!("{length} bytes long"),
                        "must have 1 to 1024 bytes",
                    )
                })
            })
            .transpose()?;
        Ok(setting(NAME, found.map(Some), None))
    }

    fn port(&self) -> Result<Setting<u16>> {
        let port = |name| -> Result<Option<u16>> {
            // The limit makes the conversion lossless.
            Ok(self
                .integer(name, 1, usize::from(u16::MAX))?
                .map(|port| port as u16))
        };
        if let Some(own) = port("DEEP_EP_PORT")? {
            return Ok(setting("DEEP_EP_PORT", Some(own), DEFAULT_PORT));
        }
        let master = port("MASTER_PORT")?;
        let taken = self.raw("TORCHELASTIC_USE_AGENT_STORE");
        let master = match master {
            Some(master) if taken.is_some_and(|value| value == "True") => {
                Some(master.checked_add(1).unwrap_or(master - 1))
            }
            other => other,
        };
        Ok(setting("MASTER_PORT", master, DEFAULT_PORT))
    }
}

fn quoted(text: &str) -> Text {
    format!("{text:?}").into()
}

#[cfg(test)]
mod tests;
