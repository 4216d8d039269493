//! The whole body of a request, for modules that want it before they go on:
//! the beginning in memory, the rest in a temporary file.
//!   client_body_buffer_size SIZE;  client_body_temp_path PATH [LEVEL ...];
//!   client_body_in_file_only on|clean|off;  client_body_in_single_buffer on|off;
//! (<https://nginx.org/en/docs/http/ngx_http_core_module.html#client_body_buffer_size>)
//!
//! Bounded whatever the client does: a body holds at most
//! `client_body_buffer_size`, one batch on its way to the file and one item of
//! the exchange; all of it on lease, so that the worker's limit holds for all
//! bodies together. Nothing more is read while a batch is being written
//! ([`Writer`]). The loop never touches the file: it is created, written and closed in the thread pool.
//! It has no name once it is open, so that nothing is left behind however the
//! request ends; unless `client_body_in_file_only` wants one. Then it keeps its name
//! only if the whole body is in it.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::io;
use std::path::PathBuf;
use std::rc::Rc;

use gale_protocol::request::KnownHeader::ContentLength;
use gale_runtime::files::{FileError, Writer, create_directories_blocking, likely_device, open_blocking};
use gale_runtime::{Buffer, Bytes, File, OpenFlags, default_pool};

use crate::configuration::settings::{BodyInFile, TempPath};
use crate::request::Request;
use crate::request::body::{Body, BodyItem, FilePiece};
use crate::request::exchange::RequestBodyError;
use gale_base::log_level::Level;

/// Pieces that come from the client are gathered in leases of this size: many
/// tiny pieces cost no more than their bytes.
const CHUNK_BYTES: usize = 16 * 1024;

/// How much is written to the file at once.
const BATCH_BYTES: usize = 64 * 1024;

/// How many names are tried for a temporary file. They are random: a second one
/// is hardly ever needed.
const NAMES_MAX: u32 = 100;

/// A body that has been read to its end. It can be read again as often as need be.
#[derive(Clone, Debug, Default)]
pub struct StoredBody {
    /// How long it is, in bytes.
    pub length: u64,
    /// Its beginning.
    pub memory: Vec<Bytes>,
    /// What did not fit into memory: a file of its own, read from its start.
    pub file: Option<File>,
    /// The name of the file, which nobody else finds any more unless `client_body_in_file_only` keeps it:
    /// `$request_body_file`.
    pub path: Option<PathBuf>,
    /// What takes the file's name away when the last copy of this goes.
    name: Option<Rc<TempName>>,
}

impl StoredBody {
    /// All of it, as items that an exchange or another codec can send.
    pub fn items(&self) -> VecDeque<BodyItem> {
        let mut items: VecDeque<BodyItem> = self.memory.iter().cloned().map(BodyItem::Bytes).collect();
        if let Some(file) = &self.file {
            items.push_back(BodyItem::File(FilePiece { file: file.clone(), offset: 0, length: self.file_length() }));
        }
        items
    }

    /// All of it, as the body of a message.
    pub fn body(&self) -> Body {
        Body::Items(self.items())
    }

    /// How much of it is in the file, in bytes.
    pub fn file_length(&self) -> u64 {
        self.length - self.memory.iter().map(|bytes| bytes.len() as u64).sum::<u64>()
    }
}

/// Reads the request's body to its end, waiting for the client, and keeps it with the
/// request: whoever asks again gets the same, and so do subrequests.
///
/// Errors: those of the client, [`RequestBodyError::NoMemory`] and [`RequestBodyError::NotStored`]; all of them are in
/// the error log, in nginx's words, when this returns. Answer with their status.
pub async fn read_body(request: &mut Request) -> Result<StoredBody, RequestBodyError> {
    if let Some(stored) = &request.body {
        return Ok(stored.clone());
    }
    let stored = store_body(request).await?;
    request.body = Some(stored.clone());
    Ok(stored)
}

/// Whether the head announces a longer body than the location takes. Said once: the page for it is not refused again.
pub fn is_refused(request: &mut Request) -> bool {
    let length_max = request.body_limits().length_max;
    let length = request.declared_body_length().unwrap_or(0);
    if length_max == 0 || length <= length_max || request.body_was_refused {
        return false;
    }
    request.body_was_refused = true;
    request.log(Level::Error, format_args!("client intended to send too large body: {length} bytes"));
    true
}

async fn store_body(request: &Request) -> Result<StoredBody, RequestBodyError> {
    let (exchange, limits) = (request.exchange(), request.body_limits());
    let mut store = Store::new(request);
    loop {
        match poll_fn(|context| exchange.poll_body(context, &limits)).await {
            Ok(Some(item)) => store.take(&item).await.map_err(|failure| failure.tell(request))?,
            Ok(None) => break,
            Err(error) => {
                log_error(request, error);
                return Err(error);
            }
        }
    }
    store.finish().await.map_err(|failure| failure.tell(request))
}

/// Says in the error log, in nginx's words, why a body could not be read. Whoever reads a body piece by piece calls it, too.
pub fn log_error(request: &Request, error: RequestBodyError) {
    let received = request.exchange().received();
    match error {
        RequestBodyError::PeerGone => request.log(Level::Info, format_args!("client prematurely closed connection")),
        RequestBodyError::TimedOut => request.log(Level::Info, format_args!("client timed out")),
        RequestBodyError::TooSlow => {
            request.log(Level::Info, format_args!("client sends its body too slowly: {received} bytes so far"));
        }
        RequestBodyError::Malformed => request.log(Level::Error, format_args!("client sent invalid chunked body")),
        RequestBodyError::TooLarge => {
            request.log(
                Level::Error,
                format_args!("client intended to send too large chunked body: over {received} bytes"),
            );
        }
        RequestBodyError::NoMemory => {
            request.log(Level::Alert, format_args!("the worker's memory for buffers is exhausted"));
        }
        RequestBodyError::NotStored => {}
    }
}

/// A body that is coming in.
struct Store<'r> {
    request: &'r Request,
    length: u64,
    /// How many more bytes memory may take.
    room: usize,
    memory: Vec<Bytes>,
    /// The chunk that is being filled.
    chunk: Buffer,
    file: Option<TempFile>,
    /// What has not been written to the file yet.
    batch: Buffer,
    in_file: BodyInFile,
}

impl Store<'_> {
    fn new(request: &Request) -> Store<'_> {
        let core = &request.scope().core;
        let in_file = *core.client_body_in_file_only.get();
        let room = if in_file == BodyInFile::Off { *core.client_body_buffer_size.get() } else { 0 };
        let (chunk, batch) = (Buffer::new(), Buffer::new());
        Store { request, length: 0, room, memory: Vec::new(), chunk, file: None, batch, in_file }
    }

    async fn take(&mut self, item: &BodyItem) -> Result<(), Unstored> {
        let bytes = match item {
            BodyItem::Bytes(bytes) => &bytes[..],
            BodyItem::Flush | BodyItem::Trailers(_) => return Ok(()),
            BodyItem::File(_) | BodyItem::Subrequest(_) => unreachable!("what a client sends is nothing of ours"),
        };
        self.length += bytes.len() as u64;
        let (kept, mut rest) = bytes.split_at(bytes.len().min(self.room));
        self.keep(kept).map_err(Unstored::of_lease)?;
        while !rest.is_empty() {
            let (part, later) = rest.split_at(rest.len().min(BATCH_BYTES - self.batch.len()));
            self.batch.append(part).map_err(Unstored::of_lease)?;
            rest = later;
            if self.batch.len() == BATCH_BYTES {
                self.write_batch().await?;
            }
        }
        Ok(())
    }

    /// Keeps bytes in memory, for which there is room in the body's bound.
    fn keep(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let (part, later) = bytes.split_at(bytes.len().min(CHUNK_BYTES - self.chunk.len()));
            self.chunk.append(part)?;
            self.room -= part.len();
            bytes = later;
            if self.chunk.len() == CHUNK_BYTES {
                self.close_chunk();
            }
        }
        Ok(())
    }

    fn close_chunk(&mut self) {
        self.memory.extend(self.chunk.take_lease().map(Bytes::from));
    }

    /// What is in memory as one piece.
    fn join(&mut self) -> io::Result<()> {
        let mut whole = Buffer::new();
        whole.spare(self.memory.iter().map(|piece| piece.len()).sum())?;
        for piece in self.memory.drain(..) {
            whole.append(&piece)?;
        }
        self.memory.extend(whole.take_lease().map(Bytes::from));
        Ok(())
    }

    /// Writes what waits for the file, which comes into being with the first batch.
    async fn write_batch(&mut self) -> Result<(), Unstored> {
        let file = match &mut self.file {
            Some(file) => file,
            place => {
                let temp_path = self.request.scope().core.client_body_temp_path.get();
                let file = TempFile::create(temp_path, self.in_file != BodyInFile::Off).await?;
                let path = file.writer.path().display();
                let message = format_args!("a client request body is buffered to a temporary file {path}");
                // Nobody need be warned of what was asked for.
                let level = if self.in_file == BodyInFile::Off { Level::Warn } else { Level::Notice };
                self.request.log(level, message);
                place.insert(file)
            }
        };
        if let Some(batch) = self.batch.take_lease() {
            file.write(batch.freeze()).await?;
        }
        Ok(())
    }

    async fn finish(mut self) -> Result<StoredBody, Unstored> {
        self.close_chunk();
        let has_body = self.request.declared_body_length() != Some(0) || self.request.header(ContentLength).is_some();
        let wants_empty_file = self.in_file != BodyInFile::Off && self.file.is_none() && has_body;
        if !self.batch.is_empty() || wants_empty_file {
            self.write_batch().await?;
        }
        if self.memory.len() > 1 && *self.request.scope().core.client_body_in_single_buffer.get() {
            self.join().map_err(Unstored::of_lease)?;
        }
        let mut stored = StoredBody { length: self.length, memory: self.memory, ..StoredBody::default() };
        if let Some(mut file) = self.file {
            stored.path = Some(file.writer.path().to_owned());
            // A file that is to stay stays from now on.
            stored.name = file.name.take_if(|_| self.in_file == BodyInFile::Clean).map(Rc::new);
            file.name.take().into_iter().for_each(TempName::keep);
            stored.file = Some(file.writer.finish().await?);
        }
        Ok(stored)
    }
}

/// Why a body was not stored.
#[derive(Debug)]
enum Unstored {
    /// A lease was refused.
    NoMemory,
    InFile(FileError),
}

impl Unstored {
    /// Only a lease that was refused says this.
    fn of_lease(_: io::Error) -> Unstored {
        Unstored::NoMemory
    }

    /// Says so in the error log.
    fn tell(&self, request: &Request) -> RequestBodyError {
        match self {
            Unstored::NoMemory => {
                log_error(request, RequestBodyError::NoMemory);
                RequestBodyError::NoMemory
            }
            Unstored::InFile(failure) => {
                request.log(Level::Crit, format_args!("{failure}"));
                RequestBodyError::NotStored
            }
        }
    }
}

impl From<FileError> for Unstored {
    fn from(failure: FileError) -> Unstored {
        Unstored::InFile(failure)
    }
}

/// A temporary file that is being written.
struct TempFile {
    writer: Writer,
    /// There while the name is.
    name: Option<TempName>,
}

/// The name of a temporary file, which is taken away with this.
#[derive(Debug)]
struct TempName {
    path: PathBuf,
    is_kept: bool,
}

impl TempName {
    fn keep(mut self) {
        self.is_kept = true;
    }
}

impl Drop for TempName {
    fn drop(&mut self) {
        if !self.is_kept {
            let path = std::mem::take(&mut self.path);
            // Refused, the file stays behind: nothing else is left to try.
            let _ = default_pool().detach(likely_device(&path), move || drop(std::fs::remove_file(&path)));
        }
    }
}

impl TempFile {
    async fn create(temp_path: &TempPath, has_name: bool) -> Result<TempFile, FileError> {
        // No more than 32 bits: the name has ten digits, as nginx's.
        let number = gale_runtime::random_u64() as u32;
        let root = temp_path.path.clone();
        let temp_path = temp_path.clone();
        let create = move || {
            let (file, path) = create_blocking(&temp_path, number, has_name)?;
            // From the first moment on: nobody may want it any more when it is there.
            let name = has_name.then(|| TempName { path: path.clone(), is_kept: false });
            Ok(TempFile { writer: Writer::new(file, path), name })
        };
        let created = default_pool().run_for(likely_device(&root), create).await;
        created.map_err(|refused| FileError::new("open", root, refused))?
    }

    /// Appends a batch.
    async fn write(&mut self, batch: Bytes) -> Result<(), FileError> {
        self.writer.append(batch).await?;
        self.writer.flush().await
    }
}

/// Creates a file that nobody else can open, and takes its name away unless that is wanted.
fn create_blocking(temp_path: &TempPath, number: u32, has_name: bool) -> Result<(File, PathBuf), FileError> {
    let new = OpenFlags { write: true, create: Some(0o600), exclusive: true, no_access_time: true, ..OpenFlags::READ };
    let mut attempts = 0;
    let mut made_directories = false;
    loop {
        let path = name(temp_path, number.wrapping_add(attempts));
        match open_blocking(&path, new) {
            Ok(file) if has_name => return Ok((file, path)),
            Ok(file) => {
                return match std::fs::remove_file(&path) {
                    Ok(()) => Ok((file, path)),
                    Err(error) => Err(FileError::new("unlink", path, error)),
                };
            }
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists && attempts < NAMES_MAX => attempts += 1,
            Err(error) if error.kind() == io::ErrorKind::NotFound && !made_directories => {
                // The levels of directories come into being when they are needed first.
                create_directories_blocking(path.parent().expect("it lies below the temporary path"), 0o700)?;
                made_directories = true;
            }
            Err(error) => return Err(FileError::new("open", path, error)),
        }
    }
}

/// nginx's names: ten digits, of which the last name the directories on the way.
/// With levels 1 and 2, number 12345 is `PATH/5/34/0000012345`.
fn name(temp_path: &TempPath, number: u32) -> PathBuf {
    let digits = format!("{number:010}");
    let mut path = temp_path.path.clone();
    let mut end = digits.len();
    for &level in &temp_path.levels {
        let start = end.saturating_sub(level.into());
        path.push(&digits[start..end]);
        end = start;
    }
    path.push(digits);
    path
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;
    use std::path::Path;

    use gale_runtime::{EventLoop, LoopOptions};
    use smallvec::smallvec;

    use super::*;
    use crate::request::exchange::mock::{self, MockExchange};
    use crate::scratch::Scratch;

    /// Every file below a directory.
    fn files_below(directory: &Scratch) -> Vec<PathBuf> {
        let mut files = Vec::new();
        let mut directories = vec![directory.path().to_owned()];
        while let Some(directory) = directories.pop() {
            for entry in std::fs::read_dir(directory).unwrap() {
                let path = entry.unwrap().path();
                if path.is_dir() { directories.push(path) } else { files.push(path) }
            }
        }
        files
    }

    fn on_a_loop<T>(work: impl Future<Output = T>) -> T {
        EventLoop::new(LoopOptions::default()).unwrap().run(work)
    }

    /// Reads what `send` lets the client send, with this much memory.
    fn read(directory: &Path, memory: usize, send: impl FnOnce(&MockExchange)) -> Result<StoredBody, RequestBodyError> {
        on_a_loop(async {
            let exchange = MockExchange::new();
            send(&exchange);
            let mut core = mock::settings();
            core.client_body_buffer_size = Default::default();
            core.client_body_buffer_size.set(memory, None);
            core.client_body_temp_path.set(TempPath { path: directory.into(), levels: smallvec![1, 2] }, None);
            let mut request = mock::request(&exchange, core);
            read_body(&mut request).await
        })
    }

    fn contents(stored: &StoredBody) -> Vec<u8> {
        let mut contents = Vec::new();
        for item in stored.items() {
            match item {
                BodyItem::Bytes(bytes) => contents.extend_from_slice(&bytes),
                BodyItem::File(FilePiece { file, offset, length }) => {
                    let mut piece = vec![0; length as usize];
                    assert_eq!(file.read_blocking(offset, &mut piece).unwrap(), piece.len());
                    contents.extend_from_slice(&piece);
                }
                other => panic!("{other:?}"),
            }
        }
        contents
    }

    fn sample(length: usize) -> Vec<u8> {
        (0..length).map(|index| (index % 251) as u8).collect()
    }

    #[test]
    fn a_small_body_stays_in_memory() {
        let directory = Scratch::new();
        let stored = read(directory.path(), 100, |client| {
            client.sends(b"hello ");
            client.sends(b"world");
            client.ends();
        });
        let stored = stored.unwrap();
        assert_eq!((stored.length, stored.memory.len(), stored.file.is_none()), (11, 1, true));
        assert_eq!(contents(&stored), b"hello world");
        assert_eq!(stored.body().length(), Some(11));
    }

    #[test]
    fn no_body_is_an_empty_one() {
        let stored = read(Path::new("/nowhere"), 100, MockExchange::ends).unwrap();
        assert_eq!((stored.length, stored.items().len()), (0, 0));
    }

    #[test]
    fn a_body_that_just_fits_needs_no_file() {
        let stored = read(Path::new("/nowhere"), 40_000, |client| {
            client.sends(&sample(40_000));
            client.ends();
        });
        let stored = stored.unwrap();
        assert_eq!((contents(&stored), stored.file_length()), (sample(40_000), 0));
    }

    #[test]
    fn what_does_not_fit_goes_to_a_file_and_both_can_be_read_again() {
        let directory = Scratch::new();
        let stored = read(directory.path(), 1000, |client| {
            sample(200_000).chunks(16_384).for_each(|piece| client.sends(piece));
            client.ends();
        });
        let stored = stored.unwrap();
        assert_eq!((stored.length, stored.file_length()), (200_000, 199_000));
        assert_eq!(contents(&stored), sample(200_000));
        assert_eq!(contents(&stored), sample(200_000), "again");
        assert_eq!(stored.file.as_ref().unwrap().metadata().size, 199_000);
        assert_eq!(stored.file.as_ref().unwrap().metadata().mode & 0o777, 0o600);
        assert_eq!(stored.file.as_ref().unwrap().metadata().links, 0);
        assert!(files_below(&directory).is_empty(), "the file has no name");
    }

    #[test]
    fn many_tiny_pieces_take_no_more_memory_than_their_bytes() {
        let stored = read(Path::new("/nowhere"), 50_000, |client| {
            sample(50_000).chunks(1).for_each(|piece| client.sends(piece));
            client.ends();
        });
        let stored = stored.unwrap();
        assert_eq!(stored.memory.len(), 50_000_usize.div_ceil(CHUNK_BYTES));
        assert_eq!(contents(&stored), sample(50_000));
    }

    #[test]
    fn stored_body_is_charged_until_its_last_copy_goes() {
        on_a_loop(async {
            let exchange = MockExchange::new();
            exchange.sends(&sample(50_000));
            exchange.ends();
            let mut core = mock::settings();
            core.client_body_buffer_size.set(50_000, None);
            let mut request = mock::request(&exchange, core);
            let stored = read_body(&mut request).await.unwrap();
            drop((request, exchange));
            assert_eq!(gale_runtime::leased_bytes(), 3 * CHUNK_BYTES + 1024);
            let part = stored.memory[1].slice(..10);
            drop(stored);
            assert_eq!((&part[..], gale_runtime::leased_bytes()), (&sample(50_000)[CHUNK_BYTES..][..10], CHUNK_BYTES));
        });
    }

    #[test]
    fn body_that_gets_no_memory_is_refused_with_503_and_leaves_none() {
        for memory in [1 << 20, 10_000] {
            on_a_loop(async {
                let directory = Scratch::new();
                // A quarter more is given out: not enough for a batch.
                gale_runtime::set_leased_bytes_max(48 * 1024);
                let exchange = MockExchange::new();
                sample(500_000).chunks(16_384).for_each(|piece| exchange.sends(piece));
                exchange.ends();
                let mut core = mock::settings();
                core.client_body_buffer_size.set(memory, None);
                core.client_body_temp_path.set(TempPath { path: directory.path().into(), levels: smallvec![] }, None);
                let mut request = mock::request(&exchange, core);
                let error = read_body(&mut request).await.unwrap_err();
                assert_eq!((error, error.status()), (RequestBodyError::NoMemory, 503));
                assert_eq!(gale_runtime::leased_bytes(), 0);
            });
        }
    }

    #[test]
    fn the_client_s_faults_are_reported() {
        for (error, status) in [
            (RequestBodyError::PeerGone, 400),
            (RequestBodyError::TimedOut, 408),
            (RequestBodyError::Malformed, 400),
            (RequestBodyError::TooLarge, 413),
        ] {
            let found = read(Path::new("/nowhere"), 100, |client| {
                client.sends(b"some");
                client.fails(error);
            });
            assert_eq!((found.unwrap_err(), error.status()), (error, status));
        }
    }

    #[test]
    fn a_body_over_the_limit_ends_the_reading() {
        let found = read(Path::new("/nowhere"), 10_000, |client| {
            client.sends(&sample(mock::BODY_MAX as usize + 1));
            client.ends();
        });
        assert_eq!(found.unwrap_err(), RequestBodyError::TooLarge);
    }

    #[test]
    fn a_directory_that_cannot_be_made_is_our_fault() {
        let found = read(Path::new("/dev/null/body"), 10, |client| {
            client.sends(&sample(100));
            client.ends();
        });
        let error = found.unwrap_err();
        assert_eq!((error, error.status()), (RequestBodyError::NotStored, 500));
    }

    #[test]
    fn a_full_disk_is_told_in_nginx_s_words() {
        on_a_loop(async {
            let full = File::from_std(std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap()).unwrap();
            let path = PathBuf::from("/tmp/5/34/0000012345");
            let mut file = TempFile { writer: Writer::new(full, path), name: None };
            let failure = file.write(sample(100).into()).await.unwrap_err();
            let expected = "pwrite() \"/tmp/5/34/0000012345\" failed (28: No space left on device)";
            assert_eq!(failure.to_string(), expected);
        });
    }

    #[test]
    fn levels_take_their_names_from_the_end_of_the_number() {
        let path = |levels: &[u8]| name(&TempPath { path: "/t".into(), levels: levels.into() }, 12345);
        assert_eq!(path(&[]), Path::new("/t/0000012345"));
        assert_eq!(path(&[1, 2]), Path::new("/t/5/34/0000012345"));
        assert_eq!(path(&[3, 3, 3]), Path::new("/t/345/012/000/0000012345"));
    }

    #[test]
    fn a_name_that_is_taken_is_passed_over_and_never_opened() {
        let directory = Scratch::new();
        let temp_path = TempPath { path: directory.path().to_owned(), levels: smallvec![] };
        let taken = name(&temp_path, 7);
        std::fs::write(&taken, "precious").unwrap();
        let (_, path) = create_blocking(&temp_path, 7, false).unwrap();
        assert_eq!(path, name(&temp_path, 8));
        assert_eq!(std::fs::read(&taken).unwrap(), b"precious");
    }

    #[test]
    fn directories_are_for_the_worker_alone() {
        let directory = Scratch::new();
        let temp_path = TempPath { path: directory.path().to_owned(), levels: smallvec![1, 2] };
        create_blocking(&temp_path, 12345, false).unwrap();
        let made = std::fs::metadata(directory.path().join("5")).unwrap();
        assert_eq!(made.permissions().mode() & 0o777, 0o700);
    }

    #[test]
    fn a_request_that_is_given_up_leaves_nothing_behind() {
        let directory = Scratch::new();
        on_a_loop(async {
            let exchange: Rc<MockExchange> = MockExchange::new();
            exchange.sends(&sample(100_000));
            let mut core = mock::settings();
            core.client_body_temp_path.set(TempPath { path: directory.path().to_owned(), levels: smallvec![] }, None);
            let mut request = mock::request(&exchange, core);
            let mut reading = Box::pin(read_body(&mut request));
            let mut client_is_asked_again = exchange.asks_for_more();
            // Until all that came is stored and more is wanted.
            poll_fn(|context| {
                assert!(reading.as_mut().poll(context).is_pending());
                client_is_asked_again.as_mut().poll(context)
            })
            .await;
        });
        assert!(files_below(&directory).is_empty());
    }
}
