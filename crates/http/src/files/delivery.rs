//! The delivery ladder: takes each piece of a file to the socket or to memory without ever blocking the loop on a disk.
//!
//! The cheapest way that cannot block is used for each piece:
//!
//! | | way | when |
//! |---|---|---|
//! | 1 | memory | a small body in the cache of open files: sent as bytes, not as a piece of a file |
//! | 2 | a read on the loop | data in the page cache (`preadv2(RWF_NOWAIT)`), up to 64 KiB at once |
//! | 3 | `sendfile` | it is on, the piece is large enough, and it is known to be in memory |
//! | 4 | a read in a pool (`aio on`: the ring) | data not in memory; files that may block or must not be probed |
//!
//! The fourth way returns the data itself. The read begins while the previous piece is still being sent, once half of
//! that has left. So a stream is read ahead of its client, which holds at most one and a half pieces: 96 KiB unless
//! `output_buffers` is larger. For a client that waits for the disk repeatedly, reads grow to 256 KiB, so it holds up
//! to that and half a piece. For a client whose socket is full repeatedly, and that takes less than a piece in a tenth
//! of a second, pieces shrink to the amount that it takes in that time (`client_rate.rs`), and the next piece is read
//! when the socket has room: the data that the kernel has queued lasts for that long.
//!
//! This module knows no protocol: HTTP/1 uses all four ways; TLS, filters and HTTP/2, which need the bytes in memory,
//! use all but `sendfile`. The figures behind the numbers are in `docs/decisions/0014-delivery-ladder.md`.
//! (<https://nginx.org/en/docs/http/ngx_http_core_module.html#aio>)

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use gale_files::{CachedRead, File, PieceRead, ReadHow, Rung, count_piece};
use gale_runtime::{Bytes, Moment, ThreadPool, default_pool, leased_bytes, leased_bytes_max};

use crate::files::FilePiece;
use crate::files::client_rate::ClientRate;

/// A piece of a file smaller than this is read even when `sendfile` is on: one call for head and body is cheaper than
/// two, and a read into warm memory is as fast as the page cache itself.
pub const SENDFILE_MIN: u64 = 64 * 1024;

/// Bytes read at once, on the loop or elsewhere, unless `output_buffers` is larger: 16 microseconds of copying.
pub const READ_PIECE: u64 = 64 * 1024;

/// Bytes read at once, at most, for a client that waits for the disk. The size doubles with each wait. A single wait
/// says little: every client waits at the beginning of a response, and a client slower than the disk may meet a moment
/// at which the disk is much slower; it would then take seconds to receive the larger piece. Larger reads do not make a
/// disk faster, and take memory.
const COLD_PIECE_MAX: u64 = 256 * 1024;

/// Near the hard limit of leases reads shrink, but not below this: the response in flight ends, slowly, and the bytes
/// that it has sent make room.
const LEAST_PIECE: u64 = 4 * 1024;

/// Time between two questions to the page cache helper for the sake of `sendfile` after which it held no pages of a
/// response: pieces are read meanwhile.
const ASK_INTERVAL: Duration = Duration::from_millis(24);

/// Upper bound of a read that `output_buffers` asks for.
const BUFFER_BYTES_MAX: u64 = 1 << 20;

/// Settings of a location for sending pieces of files.
#[derive(Clone, Debug)]
pub struct FileOptions {
    /// `sendfile`
    pub sendfile: bool,
    /// `sendfile_max_chunk` in bytes; 0 for no limit.
    pub chunk_max: u64,
    /// `tcp_nopush`
    pub nopush: bool,
    /// `aio`
    pub way: ReadWay,
    /// The pool that `aio threads` names; `default` if it names none.
    pub pool: Option<ThreadPool>,
    /// `directio`: files of at least this size bypass the page cache.
    pub direct_from: u64,
    /// `directio_alignment`
    pub direct_alignment: u32,
    /// `output_buffers`: the total size of all buffers.
    pub buffer_bytes: u64,
    /// `read_ahead` is not 0.
    pub is_sequential: bool,
    /// `postpone_output`: bytes gathered before they are sent, as long as more is available at once.
    pub postponed_bytes: u64,
}

/// The way to read data that is not in memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ReadWay {
    /// Read in a pool.
    Pool,
    /// Read by the loop's io_uring if that is the driver, else in a pool.
    Ring,
    /// `aio off`: read or sent on the loop, which may block on the disk.
    Blocking,
}

impl Default for FileOptions {
    /// Defaults of all directives, for files that are read and not sent.
    fn default() -> Self {
        FileOptions {
            sendfile: false,
            chunk_max: 0,
            nopush: false,
            way: ReadWay::Pool,
            pool: None,
            direct_from: u64::MAX,
            direct_alignment: 512,
            buffer_bytes: READ_PIECE,
            is_sequential: false,
            postponed_bytes: 0,
        }
    }
}

/// The next step for a piece.
#[derive(Debug)]
pub enum Next {
    /// These bytes, which have been taken from the piece.
    Bytes(Bytes),
    /// This many bytes can be sent by [`Delivery::sendfile`].
    Sendfile(u64),
    /// A read is in progress: [`Delivery::poll_read`].
    Reading,
}

/// Delivers pieces of files one after the other, each from its beginning to its end. Dropping it abandons a read in
/// progress.
#[derive(Default)]
pub struct Delivery {
    options: FileOptions,
    reading: Option<PieceRead>,
    /// Size of the next read of data that is not in memory.
    cold_piece: u64,
    /// True if the file system does not support `sendfile`.
    sendfile_is_refused: bool,
    client_rate: ClientRate,
    /// Offset at which the last `sendfile` ended: the rest of that piece goes the same way, however small it is.
    sendfile_ended_at: Option<u64>,
    /// Time at which the page cache helper was last asked for the sake of `sendfile`.
    asked_at: Option<Moment>,
}

impl Delivery {
    /// Creates the delivery of one response.
    pub fn new(options: FileOptions) -> Delivery {
        Delivery { options, ..Delivery::default() }
    }

    /// Begins another response on the same connection and keeps the client's rate.
    pub fn begin_response(&mut self, options: FileOptions) {
        let mut client_rate = std::mem::take(&mut self.client_rate);
        client_rate.pause();
        *self = Delivery { options, client_rate, ..Delivery::default() };
    }

    /// The options.
    pub fn options(&self) -> &FileOptions {
        &self.options
    }

    /// True if a read is in progress.
    pub fn is_reading(&self) -> bool {
        self.reading.is_some()
    }

    /// Number of unsent bytes at or below which the next part of a piece is read.
    pub fn low_water(&self) -> u64 {
        if self.waits_for_room() { 0 } else { self.read_piece() / 2 }
    }

    /// True if the next part of a piece is read only when the socket has room, because the client is slow.
    pub fn waits_for_room(&self) -> bool {
        self.slow_piece().is_some()
    }

    /// Notes that the socket is full.
    pub fn note_full(&mut self) {
        self.client_rate.note_full();
    }

    /// Size of a read for a slow client. Settings that ask for larger pieces override it.
    fn slow_piece(&self) -> Option<u64> {
        let may_be_less = self.options.buffer_bytes <= READ_PIECE && self.options.direct_from == u64::MAX;
        self.client_rate.piece().filter(|&piece| may_be_less && piece < READ_PIECE)
    }

    /// Takes the next bytes of the piece, or begins to read them. Errors: the kernel's; `UnexpectedEof` if the file has
    /// become shorter; `OutOfMemory` at the hard limit of leases.
    pub fn next(&mut self, piece: &mut FilePiece) -> io::Result<Next> {
        if self.reading.is_some() {
            return Ok(Next::Reading);
        }
        self.client_rate.look();
        if self.options.is_sequential {
            piece.file.advise_sequential();
        }
        let direct = self.direct(&piece.file);
        if self.options.way == ReadWay::Blocking {
            return self.next_in_place(piece, direct);
        }
        if direct.is_some() {
            return self.begin_read(piece, ReadHow { direct, ..ReadHow::default() });
        }
        if self.may_sendfile(piece) {
            let length = piece.file.sendfile_length(piece.offset, self.sendfile_length(piece))?;
            if length > 0 {
                return Ok(Next::Sendfile(length));
            }
            if self.may_ask(&piece.file) {
                return self.begin_read(piece, ReadHow { for_sendfile: true, ..CachedRead::NotLooked.how() });
            }
        }
        let (file, offset) = (&piece.file, piece.offset);
        match as_much_as_fits(piece.length.min(self.read_piece()), |length| file.look(offset, length))? {
            CachedRead::Found(bytes) => {
                piece.advance(bytes.len() as u64)?;
                self.client_rate.add(bytes.len() as u64);
                Ok(Next::Bytes(bytes))
            }
            missed => self.begin_read(piece, missed.how()),
        }
    }

    /// Reads or sends as nginx does, even if the loop blocks.
    fn next_in_place(&mut self, piece: &mut FilePiece, direct: Option<u32>) -> io::Result<Next> {
        if self.options.sendfile && direct.is_none() && !self.sendfile_is_refused {
            return Ok(Next::Sendfile(self.sendfile_length(piece)));
        }
        let (file, offset) = (&piece.file, piece.offset);
        let most = piece.length.min(self.read_piece());
        let bytes = as_much_as_fits(most, |length| file.read_in_place(offset, length, direct))?;
        piece.advance(bytes.len() as u64)?;
        Ok(Next::Bytes(bytes))
    }

    fn begin_read(&mut self, piece: &FilePiece, how: ReadHow) -> io::Result<Next> {
        let pool = self.options.pool.clone().unwrap_or_else(default_pool);
        let how = ReadHow { by_ring: self.options.way == ReadWay::Ring, ..how };
        let (file, offset) = (&piece.file, piece.offset);
        let begin = |length| file.begin_read(&pool, offset, length, how);
        self.reading = Some(as_much_as_fits(self.cold_length(piece), begin)?);
        Ok(Next::Reading)
    }

    /// Polls the read in progress; `piece` must be the piece that it belongs to. `starves` is true if there is nothing
    /// else to send: the client then waits for the disk, and reads grow if that continues. Errors: those of
    /// [`Delivery::next`], and the pool's.
    pub fn poll_read(
        &mut self,
        piece: &mut FilePiece,
        starves: bool,
        context: &mut Context<'_>,
    ) -> Poll<io::Result<Bytes>> {
        let reading = self.reading.as_mut().expect("a read is under way");
        let Poll::Ready(result) = Pin::new(reading).poll(context) else { return Poll::Pending };
        self.reading = None;
        self.cold_piece = if starves { (2 * self.cold_piece).clamp(READ_PIECE, COLD_PIECE_MAX) } else { READ_PIECE };
        self.client_rate.add(result.as_ref().map_or(0, |bytes| bytes.len() as u64));
        Poll::Ready(result.and_then(|bytes| piece.advance(bytes.len() as u64).map(|()| bytes)))
    }

    /// Calls `send` to send `length` bytes of the piece by `sendfile`. Errors: those of the file, and those of the
    /// socket that `send` returns.
    pub fn sendfile(
        &mut self,
        piece: &mut FilePiece,
        length: u64,
        send: impl FnOnce(&File, &mut u64, usize) -> Poll<io::Result<usize>>,
    ) -> Poll<Result<usize, FileError>> {
        let FilePiece { file, offset, .. } = piece;
        let begin = *offset;
        let is_blocking = self.options.way == ReadWay::Blocking;
        let mut at = begin;
        let polled = match is_blocking {
            true => send(file, &mut at, to_usize(length)),
            false => file.watched(|| send(file, &mut at, to_usize(length))),
        };
        let Poll::Ready(result) = polled else { return Poll::Pending };
        Poll::Ready(match result {
            Ok(count) => {
                if !is_blocking {
                    file.note_sent(begin, count);
                }
                self.sendfile_ended_at = Some(begin + count as u64);
                self.asked_at = None;
                self.client_rate.add(count as u64);
                count_piece(if is_blocking { Rung::Blocking } else { Rung::Sendfile }, count as u64);
                piece.advance(count as u64).map(|()| count).map_err(FileError::OfFile)
            }
            Err(error) => match error.raw_os_error() {
                // Some file systems do not support it.
                Some(libc::EINVAL | libc::ENOSYS | libc::EOPNOTSUPP) => {
                    self.sendfile_is_refused = true;
                    Ok(0)
                }
                _ if is_of_socket(&error) => Err(FileError::OfSocket),
                _ => Err(FileError::OfFile(error)),
            },
        })
    }

    fn may_sendfile(&self, piece: &FilePiece) -> bool {
        let is_allowed = self.options.sendfile && !self.sendfile_is_refused;
        let is_worth_it = piece.length >= SENDFILE_MIN || self.sendfile_ended_at == Some(piece.offset);
        is_allowed && is_worth_it && self.direct(&piece.file).is_none()
    }

    /// True if it is time to ask whether pages of the file may go by `sendfile`. The answer comes with the next piece.
    fn may_ask(&mut self, file: &File) -> bool {
        let now = gale_runtime::now();
        let is_time = self.asked_at.is_none_or(|at| now >= at + ASK_INTERVAL);
        let may_ask = is_time && file.must_be_held();
        if may_ask {
            self.asked_at = Some(now);
        }
        may_ask
    }

    fn direct(&self, file: &File) -> Option<u32> {
        (file.metadata().size >= self.options.direct_from).then_some(self.options.direct_alignment)
    }

    /// Length that the configuration allows for one call. A stream bounds each call too (`Stream::poll_sendfile`), and
    /// [`File::sendfile_length`] bounds it further while memory is short.
    fn sendfile_length(&self, piece: &FilePiece) -> u64 {
        let chunk_max = Some(self.options.chunk_max).filter(|&chunk| chunk > 0);
        piece.length.min(chunk_max.unwrap_or(u64::MAX))
    }

    /// Bytes read at once.
    fn read_piece(&self) -> u64 {
        self.slow_piece().unwrap_or_else(|| self.options.buffer_bytes.clamp(READ_PIECE, BUFFER_BYTES_MAX))
    }

    /// Bytes read at once of data that is not in memory: up to a boundary that other readers of the file share.
    fn cold_length(&self, piece: &FilePiece) -> u64 {
        let is_memory_short = leased_bytes() > leased_bytes_max() / 2;
        let size = match self.slow_piece() {
            Some(piece) => piece,
            None if is_memory_short => READ_PIECE,
            None => self.read_piece().max(self.cold_piece),
        };
        piece.length.min(size - piece.offset % size)
    }
}

/// The side at fault when a piece of a file does not reach the client.
#[derive(Debug)]
pub enum FileError {
    /// The file or its disk.
    OfFile(io::Error),
    /// The connection.
    OfSocket,
}

/// True if `sendfile` failed because of the connection: with an error of a failed socket or of the network.
fn is_of_socket(error: &io::Error) -> bool {
    use io::ErrorKind::*;
    matches!(
        error.kind(),
        BrokenPipe
            | ConnectionAborted
            | ConnectionRefused
            | ConnectionReset
            | HostUnreachable
            | NetworkDown
            | NetworkUnreachable
            | NotConnected
            | TimedOut
    ) || matches!(error.raw_os_error(), Some(libc::EHOSTDOWN | libc::ENETRESET | libc::ENONET | libc::EPROTO))
}

/// Asks for less if memory for the whole length is not available. Errors: those of `ask`; `OutOfMemory` if there is no
/// room even for the smallest length.
fn as_much_as_fits<T>(most: u64, mut ask: impl FnMut(usize) -> io::Result<T>) -> io::Result<T> {
    let mut length = most;
    loop {
        match ask(to_usize(length)) {
            Err(error) if error.kind() == io::ErrorKind::OutOfMemory && length > LEAST_PIECE => {
                length = (length / 4).max(LEAST_PIECE);
            }
            result => return result,
        }
    }
}

fn to_usize(length: u64) -> usize {
    usize::try_from(length).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use std::fs::FileTimes;
    use std::future::poll_fn;
    use std::time::{Duration, SystemTime};

    use gale_files::{self as files, OpenFlags, SimulatedFiles};
    use gale_runtime::simulation::{Faults, Simulation, each_seed};
    use gale_runtime::{EventLoop, LoopOptions};

    use super::*;

    #[test]
    fn rest_of_a_file_after_sendfile_goes_by_sendfile() {
        let path = std::env::temp_dir().join(format!("gale-delivery-{}", std::process::id()));
        std::fs::write(&path, vec![b'x'; 2 * to_usize(SENDFILE_MIN)]).expect("written");
        let file = std::fs::File::open(&path).expect("there");
        std::fs::remove_file(&path).expect("there");
        // Keeps reads from updating the access time, which would need a pool.
        let read_at = SystemTime::now() + Duration::from_secs(3600);
        file.set_times(FileTimes::new().set_accessed(read_at)).expect("ours");
        let file = File::from_std(file).expect("there");
        let goes_by_sendfile = |delivery: &mut Delivery, piece: &mut FilePiece| {
            let in_memory = file.look(piece.offset, to_usize(piece.length)).expect("longer than that");
            assert!(matches!(in_memory, CachedRead::Found(_)), "just written");
            matches!(delivery.next(piece).expect("nothing fails"), Next::Sendfile(_))
        };
        let mut delivery = Delivery::new(FileOptions { sendfile: true, ..FileOptions::default() });
        let mut piece = FilePiece { file: file.clone(), offset: 0, length: SENDFILE_MIN + 3000 };
        assert!(goes_by_sendfile(&mut delivery, &mut piece));
        let sent =
            delivery.sendfile(&mut piece, SENDFILE_MIN + 3000, |_, _, _| Poll::Ready(Ok(to_usize(SENDFILE_MIN))));
        assert!(matches!(sent, Poll::Ready(Ok(_))) && piece.length == 3000);
        assert!(goes_by_sendfile(&mut delivery, &mut piece), "the rest");
        let mut other = FilePiece { file: file.clone(), offset: 4096, length: 3000 };
        assert!(!goes_by_sendfile(&mut delivery, &mut other), "as short, and not begun");
    }

    #[test]
    fn a_failed_sendfile_is_the_connections_fault_only_where_sockets_fail_so() {
        let fault = |errno: i32| {
            let file = std::fs::File::open("/proc/self/exe").and_then(File::from_std).expect("it runs");
            let mut piece = FilePiece { file, offset: 0, length: SENDFILE_MIN };
            let fail = |_: &File, _: &mut u64, _| Poll::Ready(Err(io::Error::from_raw_os_error(errno)));
            Delivery::default().sendfile(&mut piece, SENDFILE_MIN, fail)
        };
        for errno in [libc::EPIPE, libc::ECONNRESET, libc::ETIMEDOUT, libc::EHOSTUNREACH, libc::ENETDOWN] {
            assert!(matches!(fault(errno), Poll::Ready(Err(FileError::OfSocket))), "{errno}");
        }
        for errno in [libc::EIO, libc::ESTALE, libc::EUCLEAN, libc::EACCES, libc::EOVERFLOW] {
            assert!(matches!(fault(errno), Poll::Ready(Err(FileError::OfFile(_)))), "{errno}");
        }
        for errno in [libc::EINVAL, libc::ENOSYS] {
            assert!(matches!(fault(errno), Poll::Ready(Ok(0))), "{errno}");
        }
    }

    #[test]
    fn reads_grow_only_for_a_client_that_waits_for_the_disk_repeatedly() {
        each_seed(3, |simulation: &Simulation| {
            simulation.add_file("/file", &vec![b'x'; 2 << 20]).unwrap();
            simulation.set_faults(Faults { cold_files: 1000, ..Faults::NONE });
            EventLoop::simulated(simulation, LoopOptions::default()).unwrap().run(async {
                let file = files::open(std::path::Path::new("/file"), OpenFlags::READ).await.unwrap();
                let mut piece = FilePiece { file, offset: 0, length: 2 << 20 };
                let mut delivery = Delivery::default();
                // Each row: whether the client waited for the read, and the KiB of the next read, which ends at a
                // boundary of its size.
                let waits = [
                    (true, 64),
                    (true, 128),
                    (true, 256),
                    (true, 256),
                    (false, 64),
                    (false, 64),
                    (true, 128),
                    (true, 256),
                ];
                let mut expected = 64;
                for (starves, next) in waits {
                    assert!(matches!(delivery.next(&mut piece), Ok(Next::Reading)));
                    let lease = poll_fn(|context| delivery.poll_read(&mut piece, starves, context)).await.unwrap();
                    assert_eq!(lease.len(), expected << 10);
                    expected = next;
                }
            });
        });
    }

    /// Reads a whole file of 1 MiB for a client whose socket is full after every piece, or never, and that takes a KiB
    /// in this many milliseconds. Returns the length of the last pieces.
    fn last_pieces(milliseconds_per_kib: u32, is_full: bool, options: FileOptions) -> usize {
        let longest = std::cell::Cell::new(0);
        each_seed(3, |simulation: &Simulation| {
            add_cold_file(simulation);
            EventLoop::simulated(simulation, LoopOptions::default()).unwrap().run(async {
                let mut piece = FilePiece { file: open_file().await, offset: 0, length: 1 << 20 };
                let mut delivery = Delivery::new(options.clone());
                while piece.length > 0 {
                    let length = read_slowly(&mut delivery, &mut piece, milliseconds_per_kib).await;
                    if is_full {
                        delivery.note_full();
                    }
                    if piece.length < 1 << 18 {
                        longest.set(longest.get().max(length));
                    }
                }
            });
        });
        longest.get() >> 10
    }

    fn add_cold_file(simulation: &Simulation) {
        simulation.add_file("/file", &vec![b'x'; 1 << 20]).unwrap();
        simulation.set_faults(Faults { cold_files: 1000, ..Faults::NONE });
    }

    async fn open_file() -> File {
        files::open(std::path::Path::new("/file"), OpenFlags::READ).await.unwrap()
    }

    /// Reads the next bytes for a client that takes a KiB in this many milliseconds. Returns their length.
    async fn read_slowly(delivery: &mut Delivery, piece: &mut FilePiece, milliseconds_per_kib: u32) -> usize {
        assert!(matches!(delivery.next(piece), Ok(Next::Reading)));
        let bytes = poll_fn(|context| delivery.poll_read(piece, false, context)).await.unwrap();
        gale_runtime::sleep(Duration::from_millis(1) * milliseconds_per_kib * (bytes.len() >> 10) as u32).await;
        bytes.len()
    }

    #[test]
    fn pieces_shrink_to_a_tenth_of_a_second_for_a_slow_client() {
        let any = FileOptions::default;
        // 1 Mbit/s, half of that, and nearly nothing.
        assert_eq!([8, 16, 1000].map(|milliseconds| last_pieces(milliseconds, true, any())), [16, 8, 4]);
        // A fast client, a client whose disk is slow, and one with large `output_buffers`.
        assert_eq!((last_pieces(1, true, any()), last_pieces(8, false, any())), (64, 64));
        assert_eq!(last_pieces(8, true, FileOptions { buffer_bytes: 1 << 17, ..any() }), 128);
    }

    #[test]
    fn client_that_was_slow_is_taken_for_slow_in_its_next_response() {
        each_seed(3, |simulation: &Simulation| {
            add_cold_file(simulation);
            EventLoop::simulated(simulation, LoopOptions::default()).unwrap().run(async {
                let mut piece = FilePiece { file: open_file().await, offset: 0, length: 1 << 20 };
                let mut delivery = Delivery::new(FileOptions::default());
                // Three responses of half a second, separated by time that does not count.
                for expected in [64, 64, 16] {
                    delivery.begin_response(FileOptions::default());
                    assert_eq!(read_slowly(&mut delivery, &mut piece, 8).await >> 10, expected);
                    delivery.note_full();
                    delivery.begin_response(FileOptions::default());
                    gale_runtime::sleep(Duration::from_secs(60)).await;
                }
            });
        });
    }
}
