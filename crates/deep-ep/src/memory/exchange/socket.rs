//! Abstract Unix sockets that carry records and files: first of all one greeting each way.
//!
//! The sockets keep records apart (`SOCK_SEQPACKET`): a record arrives whole or not at all, so
//! there is nothing to reassemble. None of the calls here blocks.

use std::{
    io::{IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use rustix::{
    io::{Errno, Result},
    net::{
        AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
        SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags,
        SocketType, accept_with, bind, connect, listen, recvmsg, sendmsg, socket_with,
        sockopt::socket_peercred,
    },
    process::geteuid,
};

use super::card::{TOKEN_BYTES, Token, take};

/// Connections that the kernel keeps until they are accepted; more than a host has ranks.
const BACKLOG: i32 = 1024;

/// Room for this many received files. Extra ones are closed here; still more by the kernel.
const FILES: usize = 4;

const FLAGS: SocketFlags = SocketFlags::CLOEXEC.union(SocketFlags::NONBLOCK);

/// Listens on an abstract name, which exists as long as the socket does.
pub(super) fn listen_on(name: &[u8]) -> Result<OwnedFd> {
    let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, FLAGS, None)?;
    bind(&socket, &SocketAddrUnix::new_abstract_name(name)?)?;
    listen(&socket, BACKLOG)?;
    Ok(socket)
}

/// Connects to a listener of the own user. `Err(AGAIN)`: its queue is full, try later;
/// `Err(CONNREFUSED)`: nobody listens; `Err(PERM)`: another user does.
pub(super) fn connect_to(name: &[u8]) -> Result<OwnedFd> {
    let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, FLAGS, None)?;
    connect(&socket, &SocketAddrUnix::new_abstract_name(name)?)?;
    same_user(&socket)?;
    Ok(socket)
}

/// The next connection of the own user; those of others are closed. `None`: no more for now.
pub(super) fn accept_from(listener: &OwnedFd) -> Result<Option<OwnedFd>> {
    loop {
        match accept_with(listener, FLAGS) {
            Ok(socket) if same_user(&socket).is_ok() => return Ok(Some(socket)),
            Ok(_) | Err(Errno::INTR | Errno::CONNABORTED) => {}
            Err(Errno::AGAIN) => return Ok(None),
            Err(error) => return Err(error),
        }
    }
}

/// The kernel says who is at the other end of a Unix socket; nobody can pretend.
fn same_user(socket: &OwnedFd) -> Result<()> {
    if socket_peercred(socket)?.uid == geteuid() {
        Ok(())
    } else {
        Err(Errno::PERM)
    }
}

/// The direction of a greeting.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// "I am rank `from`; give me your file."
    Request,
    /// "I am rank `from`; here is my file."
    Reply,
}

/// What goes over a connection, once in each direction.
///
/// 8 bytes `DEEPEPQ1` (request) or `DEEPEPR1` (reply), 4 bytes rank of the sender, the receiver's
/// token (which shows that the sender is of the group), the sender's token (which shows its rank).
#[derive(Debug, Clone, Copy)]
pub(super) struct Greeting {
    pub kind: Kind,
    pub from: u32,
    pub to_token: Token,
    pub from_token: Token,
}

pub(super) const GREETING_BYTES: usize = 8 + 4 + 2 * TOKEN_BYTES;

impl Greeting {
    fn encode(&self) -> Vec<u8> {
        let magic = match self.kind {
            Kind::Request => b"DEEPEPQ1",
            Kind::Reply => b"DEEPEPR1",
        };
        let mut bytes = Vec::with_capacity(GREETING_BYTES);
        bytes.extend_from_slice(magic);
        bytes.extend_from_slice(&self.from.to_le_bytes());
        bytes.extend_from_slice(&self.to_token.0);
        bytes.extend_from_slice(&self.from_token.0);
        bytes
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        if bytes.len() != GREETING_BYTES {
            return None;
        }
        let mut rest = bytes;
        let kind = match &take::<8>(&mut rest)? {
            b"DEEPEPQ1" => Kind::Request,
            b"DEEPEPR1" => Kind::Reply,
            _ => return None,
        };
        Some(Self {
            kind,
            from: u32::from_le_bytes(take(&mut rest)?),
            to_token: Token(take(&mut rest)?),
            from_token: Token(take(&mut rest)?),
        })
    }
}

/// Sends a greeting, with a file if there is one to give.
pub(super) fn send(
    socket: &OwnedFd,
    greeting: &Greeting,
    file: Option<BorrowedFd<'_>>,
) -> Result<()> {
    send_record(socket, &greeting.encode(), file)
}

/// Sends one record of at least a byte, with a file if there is one to give. `Err(AGAIN)`: there is
/// no room now; `Err(PIPE)` or `Err(CONNRESET)`: the other end is closed.
pub(crate) fn send_record(
    socket: &OwnedFd,
    bytes: &[u8],
    file: Option<BorrowedFd<'_>>,
) -> Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let files: Vec<_> = file.into_iter().collect();
    if !files.is_empty() && !control.push(SendAncillaryMessage::ScmRights(&files)) {
        return Err(Errno::NOBUFS);
    }
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    let sent = sendmsg(socket, &[IoSlice::new(bytes)], &mut control, flags)?;
    if sent == bytes.len() {
        Ok(())
    } else {
        Err(Errno::MSGSIZE)
    }
}

/// What [`receive`] found.
#[derive(Debug)]
pub(super) enum Received {
    /// Nothing yet.
    Nothing,
    /// The other end closed the connection, or reset it.
    Closed,
    /// A record that is no greeting.
    Garbage,
    /// A greeting and the files that came with it (at most [`FILES`]).
    Greeting(Greeting, Vec<OwnedFd>),
}

/// Takes the next record, if there is one. Files that come with garbage are closed.
pub(super) fn receive(socket: &OwnedFd) -> Received {
    match receive_record::<GREETING_BYTES>(socket) {
        Record::Nothing => Received::Nothing,
        Record::Closed => Received::Closed,
        Record::Whole(bytes, files) => match Greeting::decode(&bytes) {
            Some(greeting) => Received::Greeting(greeting, files),
            None => Received::Garbage,
        },
        Record::Other => Received::Garbage,
    }
}

/// What [`receive_record`] found.
#[derive(Debug)]
pub(crate) enum Record<const N: usize> {
    /// Nothing yet.
    Nothing,
    /// The other end closed the connection, or reset it.
    Closed,
    /// A record of another length, or cut off. Its files are closed.
    Other,
    /// A record of this length and the files that came with it (at most [`FILES`]).
    Whole([u8; N], Vec<OwnedFd>),
}

/// Takes the next record, of which `N` bytes are expected, if there is one.
pub(crate) fn receive_record<const N: usize>(socket: &OwnedFd) -> Record<N> {
    // One byte more than expected, so that a longer record is not taken for one.
    let mut bytes = [0; N];
    let mut more = [0; 1];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FILES))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
    let mut slices = [IoSliceMut::new(&mut bytes), IoSliceMut::new(&mut more)];
    let message = match recvmsg(socket.as_fd(), &mut slices, &mut control, flags) {
        Ok(message) => message,
        Err(Errno::AGAIN | Errno::INTR) => return Record::Nothing,
        Err(_) => return Record::Closed,
    };
    let mut files = Vec::new();
    for part in control.drain() {
        if let RecvAncillaryMessage::ScmRights(some) = part {
            files.extend(some);
        }
    }
    match message.bytes {
        0 => Record::Closed,
        n if n == N && !message.flags.contains(ReturnFlags::TRUNC) => Record::Whole(bytes, files),
        _ => Record::Other,
    }
}
