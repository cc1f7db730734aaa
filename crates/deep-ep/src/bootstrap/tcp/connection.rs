//! A connection after the handshake: frames in, blocks out, never blocking.

use std::{
    collections::VecDeque,
    io::{self, Read, Write},
    net::{Shutdown, TcpStream},
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    time::{Duration, Instant},
};

use rustix::{
    event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll},
    net::sockopt,
};

use super::frame::{Block, Decoder, Frame, FrameError, Sender};

/// How long a host may be silent before keep-alive probes go out, and how far these are apart.
const KEEP_ALIVE_IDLE: Duration = Duration::from_secs(5);
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(2);
const KEEP_ALIVE_PROBES: u32 = 4;
/// How long bytes may stay unacknowledged, or wait for a peer that takes none, before it counts as
/// gone. Every rank's I/O thread always reads, so that a slow caller is not concerned.
const UNACKNOWLEDGED: Duration = Duration::from_secs(15);

/// The most bytes taken from one connection before another has its turn.
const READ_AT_ONCE: usize = 1 << 20;

/// Why a connection can no longer be read.
#[derive(Debug, thiserror::Error)]
pub(super) enum Broken {
    #[error("the connection was closed")]
    Closed,
    #[error("{0}")]
    Io(#[from] io::Error),
    #[error("it sent {0}")]
    Frame(#[from] FrameError),
}

pub(super) struct Connection {
    stream: TcpStream,
    decoder: Decoder,
    outbox: VecDeque<Block>,
    /// How much of the first block is sent.
    sent: usize,
    /// Nothing more can be, or is to be, written.
    write_closed: bool,
}

impl Connection {
    /// Takes a stream whose handshake is done. `sender` is the other side.
    pub(super) fn new(stream: TcpStream, sender: Sender) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        sockopt::set_socket_keepalive(&stream, true)?;
        sockopt::set_tcp_keepidle(&stream, KEEP_ALIVE_IDLE)?;
        sockopt::set_tcp_keepintvl(&stream, KEEP_ALIVE_INTERVAL)?;
        sockopt::set_tcp_keepcnt(&stream, KEEP_ALIVE_PROBES)?;
        sockopt::set_tcp_user_timeout(&stream, UNACKNOWLEDGED.as_millis() as u32)?;
        Ok(Self {
            stream,
            decoder: Decoder::new(sender),
            outbox: VecDeque::new(),
            sent: 0,
            write_closed: false,
        })
    }

    /// Queues a block behind those not sent yet.
    pub(super) fn queue(&mut self, block: Block) {
        if !self.write_closed {
            self.outbox.push_back(block);
        }
    }

    /// Sends what can be sent now. If the peer takes nothing any more, what is queued is dropped;
    /// that it is gone will show on the reading side, behind what it sent before.
    pub(super) fn flush(&mut self) {
        while let Some(block) = self.outbox.front() {
            match (&self.stream).write(&block[self.sent..]) {
                Ok(count) => {
                    self.sent += count;
                    if self.sent == block.len() {
                        self.outbox.pop_front();
                        self.sent = 0;
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => {
                    self.outbox.clear();
                    self.write_closed = true;
                }
            }
        }
    }

    /// Whether everything queued is sent, or never will be.
    pub(super) fn is_flushed(&self) -> bool {
        self.outbox.is_empty()
    }

    /// Tells the peer that nothing follows. What it sends can still be read.
    pub(super) fn close_write(&mut self) {
        if !self.write_closed {
            self.write_closed = true;
            let _ = self.stream.shutdown(Shutdown::Write);
        }
    }

    /// Reads what is there, using `scratch`, and appends the frames it completes. On an error the
    /// frames before it are appended as well.
    pub(super) fn receive(
        &mut self,
        scratch: &mut [u8],
        frames: &mut Vec<Frame>,
    ) -> Result<(), Broken> {
        let mut taken = 0;
        while taken < READ_AT_ONCE {
            match (&self.stream).read(scratch) {
                Ok(0) => return Err(Broken::Closed),
                Ok(count) => {
                    taken += count;
                    self.decoder.feed(&scratch[..count], frames)?;
                    if count < scratch.len() {
                        break;
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Whether the peer has closed the connection, as far as it is known. Nothing is read.
    pub(super) fn is_hung_up(&self) -> bool {
        match self.stream.peek(&mut [0]) {
            Ok(count) => count == 0,
            Err(error) => !matches!(
                error.kind(),
                io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
            ),
        }
    }

    /// What to poll for.
    pub(super) fn interest(&self) -> PollFlags {
        if self.outbox.is_empty() {
            PollFlags::IN
        } else {
            PollFlags::IN | PollFlags::OUT
        }
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

/// Polls until something is ready, or until `deadline`. May return early.
pub(super) fn poll_until(fds: &mut [PollFd<'_>], deadline: Option<Instant>) {
    let timeout = deadline.map(|deadline| {
        let left = deadline.saturating_duration_since(Instant::now());
        Timespec {
            tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: i64::from(left.subsec_nanos()),
        }
    });
    match poll(fds, timeout.as_ref()) {
        Ok(_) | Err(rustix::io::Errno::INTR) => {}
        Err(error) => {
            // For want of memory, for example: try again, but not at full speed.
            tracing::warn!(%error, "polling the connections failed");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// Wakes a thread that polls.
pub(super) struct Waker(OwnedFd);

impl Waker {
    pub(super) fn new() -> io::Result<Self> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        Ok(Self(eventfd(0, flags)?))
    }

    /// Makes the poll in progress, or the next one, return.
    pub(super) fn wake(&self) {
        // It can only fail because so many wake-ups are pending already.
        let _ = rustix::io::write(&self.0, &1_u64.to_ne_bytes());
    }

    /// Forgets the wake-ups so far.
    pub(super) fn reset(&self) {
        let _ = rustix::io::read(&self.0, &mut [0; 8]);
    }
}

impl AsFd for Waker {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
