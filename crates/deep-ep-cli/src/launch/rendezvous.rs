//! What the processes of a job are told, so that they find each other.

use std::{
    net::{Ipv4Addr, SocketAddrV4},
    os::fd::OwnedFd,
    process::Command,
};

use anyhow::{Context, Result, anyhow, ensure};
use rustix::{
    net,
    process::{Pid, Signal, getppid, set_parent_process_death_signal},
};

/// Where and how the ranks of a job on this host meet. The port is kept while this lives.
pub(super) struct Rendezvous {
    ranks: usize,
    port: Port,
    secret: String,
}

impl Rendezvous {
    pub(super) fn new(ranks: usize) -> Result<Self> {
        Ok(Self {
            ranks,
            port: Port::reserve()?,
            secret: secret()?,
        })
    }

    /// Puts into the environment of a process that it is `rank`, and where to meet.
    pub(super) fn tell(&self, command: &mut Command, rank: usize) {
        let (rank, ranks) = (rank.to_string(), self.ranks.to_string());
        command
            .env("RANK", &rank)
            .env("LOCAL_RANK", &rank)
            .env("WORLD_SIZE", &ranks)
            .env("LOCAL_WORLD_SIZE", &ranks)
            .env("MASTER_ADDR", "127.0.0.1")
            .env("MASTER_PORT", self.port.number.to_string())
            .env("DEEP_EP_SECRET", &self.secret)
            .env_remove("DEEP_EP_PORT")
            .env_remove("TORCHELASTIC_USE_AGENT_STORE");
    }
}

/// A port for the rendezvous, kept from other programs until rank 0 listens on it: it is bound here
/// but never listens, so that only who asks for this very port, to reuse it, gets it.
struct Port {
    number: u16,
    _bound: OwnedFd,
}

impl Port {
    fn reserve() -> Result<Self> {
        let reserve = || {
            let socket = net::socket_with(
                net::AddressFamily::INET,
                net::SocketType::STREAM,
                net::SocketFlags::CLOEXEC,
                None,
            )?;
            net::sockopt::set_socket_reuseaddr(&socket, true)?;
            net::bind(&socket, &SocketAddrV4::new(Ipv4Addr::LOCALHOST, 0))?;
            let address = SocketAddrV4::try_from(net::getsockname(&socket)?)?;
            Ok::<_, rustix::io::Errno>(Self {
                number: address.port(),
                _bound: socket,
            })
        };
        reserve().context("no free port on 127.0.0.1 for the rendezvous")
    }
}

/// A secret that keeps other users of this machine out of the rendezvous.
fn secret() -> Result<String> {
    let mut bytes = [0u8; 16];
    getrandom::fill(&mut bytes).map_err(|error| anyhow!("no random bytes: {error}"))?;
    Ok(bytes.iter().map(|b| format!("{b:02x}")).collect())
}

/// Lets the kernel kill this process when the launcher is gone, also if it is gone already.
pub(super) fn die_with(launcher: i32) -> Result<()> {
    set_parent_process_death_signal(Some(Signal::KILL))?;
    ensure!(getppid() == Pid::from_raw(launcher), "the launcher is gone");
    Ok(())
}
