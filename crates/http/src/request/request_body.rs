//! The whole body of a request, for modules that need it before they go on: the beginning in memory, the rest in a
//! temporary file.
//!   client_body_buffer_size SIZE;  client_body_temp_path PATH [LEVEL ...];
//!   client_body_in_file_only on|clean|off;  client_body_in_single_buffer on|off;
//! (<https://nginx.org/en/docs/http/ngx_http_core_module.html#client_body_buffer_size>)
//!
//! A [`Spool`] stores it. A body holds at most `client_body_buffer_size`, the bytes in flight to the file and one item
//! of the exchange; all of it is leased, so the worker's limit holds for all bodies together. While the disk is behind,
//! nothing more is read from the client. The file has no name once it is open, so nothing is left when the request
//! ends; with `client_body_in_file_only` it has one, and keeps it only if the whole body is in the file.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::future::poll_fn;
use std::ops::RangeBounds;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;

use gale_base::log_level::Level;
use gale_files::File;
use gale_protocol::request::KnownHeader::ContentLength;
use gale_runtime::{Buffer, Bytes};
use gale_spool::{Spool, SpoolError, SpoolOptions, SpoolPath, SpoolReader, Spooled};

use crate::request::Request;
use crate::request::body::{Body, BodyItem, FilePiece};
use crate::request::configuration::settings::BodyInFile;
use crate::request::exchange::RequestBodyError;

/// A body that has been read to its end. It can be read any number of times; clones share it.
#[derive(Clone, Debug, Default)]
pub struct StoredBody {
    /// `None` if the body is empty.
    spooled: Option<Spooled>,
    /// The trailers.
    trailers: Rc<[(Bytes, Bytes)]>,
}

impl StoredBody {
    /// Length of the body in bytes.
    pub fn length(&self) -> u64 {
        self.spooled.as_ref().map_or(0, Spooled::length)
    }

    /// The part in memory: the beginning.
    pub fn memory(&self) -> Vec<Bytes> {
        self.spooled.as_ref().map(Spooled::memory).unwrap_or_default()
    }

    /// The file with the part that did not fit into memory, from offset 0.
    pub fn file(&self) -> Option<File> {
        self.spooled.as_ref().and_then(Spooled::file)
    }

    /// Length of the part in the file, in bytes.
    pub fn file_length(&self) -> u64 {
        self.spooled.as_ref().map_or(0, Spooled::file_length)
    }

    /// `$request_body_file`: the name of the file. It is removed from the directory unless `client_body_in_file_only`
    /// keeps it.
    pub fn path(&self) -> Option<Arc<Path>> {
        self.spooled.as_ref().and_then(Spooled::path)
    }

    /// The client's trailers. They may be passed on as trailers, and are never merged into a head (RFC 9110 §6.5.1).
    pub fn trailers(&self) -> &[(Bytes, Bytes)] {
        &self.trailers
    }

    /// The name of the file that holds the whole body, after [`read_body_to_file`]. The file is removed with the body,
    /// unless a caller that has renamed it calls [`StoredBody::keep`].
    pub fn name(&self) -> Option<Arc<Path>> {
        self.spooled.as_ref().and_then(Spooled::name)
    }

    /// Keeps the file, which may have been renamed.
    pub fn keep(&self) {
        if let Some(spooled) = &self.spooled {
            spooled.keep();
        }
    }

    /// The whole body as items that an exchange or another codec can send; trailers come last.
    pub fn items(&self) -> VecDeque<BodyItem> {
        let mut items: VecDeque<BodyItem> = self.memory().into_iter().map(BodyItem::Bytes).collect();
        if let Some(file) = self.file() {
            items.push_back(BodyItem::File(FilePiece { file, offset: 0, length: self.file_length() }));
        }
        if !self.trailers.is_empty() {
            items.push_back(BodyItem::Trailers(self.trailers.to_vec()));
        }
        items
    }

    /// The whole body as the body of a message.
    pub fn body(&self) -> Body {
        Body::Items(self.items())
    }

    /// Returns a reader of this range; `None` if the body is empty.
    pub fn read(&self, range: impl RangeBounds<u64>) -> Option<SpoolReader> {
        self.spooled.as_ref().map(|spooled| spooled.read(range))
    }
}

/// Copy of a body that is passed on while it is received, for `$request_body`. A body that exceeds
/// `client_body_buffer_size` has no copy, and the variable no value, as with a body in a file.
#[derive(Default)]
pub struct PassedBody(RefCell<Passed>);

/// The bytes of a [`PassedBody`].
enum Passed {
    All(Buffer),
    TooLong,
}

impl Default for Passed {
    fn default() -> Passed {
        Passed::All(Buffer::default())
    }
}

impl PassedBody {
    /// Copies a received piece, if the configuration mentions `$request_body`.
    pub fn note(request: &Request, piece: &[u8]) {
        if !request.http().variables.mentions("request_body") {
            return;
        }
        let length_max = *request.scope().core.client_body_buffer_size.get();
        let note = request.shared_note::<PassedBody>();
        let passed = &mut *note.0.borrow_mut();
        if let Passed::All(bytes) = passed
            && (bytes.len() + piece.len() > length_max || bytes.append(piece).is_err())
        {
            *passed = Passed::TooLong;
        }
    }

    /// Appends the body and returns `true`, if it is not empty and all of it was kept.
    pub fn append(&self, out: &mut Vec<u8>) -> bool {
        match &*self.0.borrow() {
            Passed::All(bytes) if !bytes.is_empty() => {
                out.extend_from_slice(bytes.readable());
                true
            }
            Passed::All(_) | Passed::TooLong => false,
        }
    }
}

/// Reads the request's body to its end, waiting for the client, and keeps it with the request: later calls return the
/// same body, also those for subrequests.
///
/// Errors: those of the client, [`RequestBodyError::NoMemory`] and [`RequestBodyError::NotStored`]; all of them are in
/// the error log, in nginx's words, when this returns. Answer with their status.
pub async fn read_body(request: &mut Request) -> Result<StoredBody, RequestBodyError> {
    if let Some(stored) = &request.body {
        return Ok(stored.clone());
    }
    let stored = store_body(request, false).await?;
    request.body = Some(stored.clone());
    Ok(stored)
}

/// Like [`read_body`], but stores the whole body, even an empty one, in a named file, to be renamed. A body that was
/// read before stays as it is, perhaps without a file ([`StoredBody::name`]).
///
/// Errors: those of [`read_body`].
pub async fn read_body_to_file(request: &mut Request) -> Result<StoredBody, RequestBodyError> {
    if let Some(stored) = &request.body {
        return Ok(stored.clone());
    }
    let stored = store_body(request, true).await?;
    request.body = Some(stored.clone());
    Ok(stored)
}

/// Returns `true` if the head announces a longer body than the location accepts; only once, so that the error page is
/// not refused again.
pub fn is_refused(request: &mut Request) -> bool {
    let length_max = request.body_limits().length_max;
    let length = request.declared_body_length().unwrap_or(0);
    if length_max == 0 || length <= length_max || request.arrival.body_was_refused {
        return false;
    }
    request.arrival.body_was_refused = true;
    request.log(Level::Error, format_args!("client intended to send too large body: {length} bytes"));
    true
}

async fn store_body(request: &Request, becomes_file: bool) -> Result<StoredBody, RequestBodyError> {
    let (exchange, limits) = (request.exchange(), request.body_limits());
    let mut store = Store::new(request, becomes_file);
    loop {
        match poll_fn(|context| exchange.poll_body(context, &limits)).await {
            Ok(Some(item)) => store.take(item).await.map_err(|failure| tell(request, &failure))?,
            Ok(None) => break,
            Err(error) => {
                log_error(request, error);
                return Err(error);
            }
        }
    }
    store.finish().await.map_err(|failure| tell(request, &failure))
}

/// Logs the reason that a body was not stored.
fn tell(request: &Request, failure: &SpoolError) -> RequestBodyError {
    match failure {
        SpoolError::NoMemory => {
            log_error(request, RequestBodyError::NoMemory);
            RequestBodyError::NoMemory
        }
        SpoolError::File(_) | SpoolError::TooLong | SpoolError::BrokenOff(_) => {
            request.log(Level::Crit, format_args!("{failure}"));
            RequestBodyError::NotStored
        }
    }
}

/// Logs, in nginx's words, the reason that a body could not be read. Readers of a body in pieces call it, too.
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

/// A body that is being received.
struct Store<'r> {
    request: &'r Request,
    /// `None` before the first byte.
    spool: Option<Spool>,
    trailers: Vec<(Bytes, Bytes)>,
    in_file: BodyInFile,
    /// The caller wants the body in a file: [`read_body_to_file`].
    becomes_file: bool,
    /// The file's name has been logged, or is not to be.
    file_is_logged: bool,
}

impl Store<'_> {
    fn new(request: &Request, becomes_file: bool) -> Store<'_> {
        let in_file = match becomes_file {
            true => BodyInFile::Clean,
            false => *request.scope().core.client_body_in_file_only.get(),
        };
        // A file that the caller asked for is not logged.
        Store { request, spool: None, trailers: Vec::new(), in_file, becomes_file, file_is_logged: becomes_file }
    }

    async fn take(&mut self, item: BodyItem) -> Result<(), SpoolError> {
        let bytes = match item {
            BodyItem::Bytes(bytes) => bytes,
            BodyItem::Trailers(fields) => {
                self.trailers = fields;
                return Ok(());
            }
            BodyItem::Flush => return Ok(()),
            BodyItem::File(_) | BodyItem::Subrequest(_) => unreachable!("what a client sends is nothing of ours"),
        };
        let spool = self.spool();
        let ready = spool.ready().await;
        let path = spool.path();
        self.log_file(path);
        ready?;
        self.spool().append_copy(&bytes)
    }

    async fn finish(mut self) -> Result<StoredBody, SpoolError> {
        let has_body = self.request.declared_body_length() != Some(0) || self.request.header(ContentLength).is_some();
        if self.becomes_file || self.in_file != BodyInFile::Off && has_body {
            // An empty body gets a file, too.
            self.spool().begin_file();
        }
        let trailers = std::mem::take(&mut self.trailers).into();
        let Some(spool) = self.spool.take() else { return Ok(StoredBody { spooled: None, trailers }) };
        let spooled = spool.finish().await?;
        self.log_file(spooled.path());
        if *self.request.scope().core.client_body_in_single_buffer.get() {
            spooled.join_memory()?;
        }
        if self.in_file == BodyInFile::On {
            spooled.keep();
        }
        Ok(StoredBody { spooled: Some(spooled), trailers })
    }

    fn spool(&mut self) -> &mut Spool {
        self.spool.get_or_insert_with(|| {
            let core = &self.request.scope().core;
            let temp_path = core.client_body_temp_path.get().clone();
            let (memory_max, place) = match self.in_file {
                BodyInFile::Off => (*core.client_body_buffer_size.get(), SpoolPath::Unnamed(temp_path)),
                BodyInFile::On | BodyInFile::Clean => (0, SpoolPath::Named(temp_path)),
            };
            // The exchange limits the length.
            Spool::new(SpoolOptions { memory_max, length_max: None, place, pool: None })
        })
    }

    /// Logs the file's name, once the file exists.
    fn log_file(&mut self, path: Option<Arc<Path>>) {
        let Some(path) = path.filter(|_| !self.file_is_logged) else { return };
        self.file_is_logged = true;
        // A file that the configuration asks for needs no warning.
        let level = if self.in_file == BodyInFile::Off { Level::Warn } else { Level::Notice };
        let path = path.display();
        self.request.log(level, format_args!("a client request body is buffered to a temporary file {path}"));
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;
    use std::rc::Rc;

    use gale_runtime::{EventLoop, LoopOptions};
    use smallvec::smallvec;

    use super::*;
    use crate::request::configuration::settings::TempPath;
    use crate::request::exchange::mock::{self, MockExchange};
    use crate::scratch::Scratch;

    /// The spool gathers in leases of this size.
    const CHUNK_BYTES: usize = 16 * 1024;

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
        assert_eq!((stored.length(), stored.memory().len(), stored.file().is_none()), (11, 1, true));
        assert_eq!(contents(&stored), b"hello world");
        assert_eq!(stored.body().length(), Some(11));
    }

    #[test]
    fn no_body_is_an_empty_one() {
        let stored = read(Path::new("/nowhere"), 100, MockExchange::ends).unwrap();
        assert_eq!((stored.length(), stored.items().len()), (0, 0));
    }

    #[test]
    fn trailers_stand_behind_the_body_each_time_it_is_read() {
        let directory = Scratch::new();
        for length in [0, 100, 5000] {
            let stored = read(directory.path(), 1000, |client| {
                if length > 0 {
                    client.sends(&sample(length));
                }
                client.sends_trailers(&[("Digest", "one"), ("X", "two")]);
                client.ends();
            });
            let stored = stored.unwrap();
            assert_eq!((stored.length(), stored.trailers().len()), (length as u64, 2));
            for _ in 0..2 {
                let mut items = stored.clone().items();
                assert_eq!(stored.body().length(), Some(length as u64));
                let Some(BodyItem::Trailers(fields)) = items.pop_back() else { panic!("they come last") };
                assert_eq!(fields, [("Digest".into(), "one".into()), ("X".into(), "two".into())]);
                assert!(!items.iter().any(|item| matches!(item, BodyItem::Trailers(_))));
            }
        }
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
        assert_eq!((stored.length(), stored.file_length()), (200_000, 199_000));
        assert_eq!(contents(&stored), sample(200_000));
        assert_eq!(contents(&stored), sample(200_000), "again");
        assert_eq!(stored.file().unwrap().metadata().size, 199_000);
        assert_eq!(stored.file().unwrap().metadata().mode & 0o777, 0o600);
        assert_eq!(stored.file().unwrap().metadata().links, 0);
        assert!(files_below(&directory).is_empty(), "the file has no name");
    }

    #[test]
    fn many_tiny_pieces_take_no_more_memory_than_their_bytes() {
        let stored = read(Path::new("/nowhere"), 50_000, |client| {
            sample(50_000).chunks(1).for_each(|piece| client.sends(piece));
            client.ends();
        });
        let stored = stored.unwrap();
        assert_eq!(stored.memory().len(), 50_000_usize.div_ceil(CHUNK_BYTES));
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
            let part = stored.memory()[1].slice(..10);
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
    fn a_request_that_is_given_up_leaves_nothing_behind() {
        let directory = Scratch::new();
        on_a_loop(async {
            let exchange: Rc<MockExchange> = MockExchange::new();
            exchange.sends(&sample(100_000));
            let mut core = mock::settings();
            core.client_body_temp_path.set(TempPath { path: directory.path().into(), levels: smallvec![] }, None);
            let mut request = mock::request(&exchange, core);
            let mut reading = Box::pin(read_body(&mut request));
            let mut client_is_asked_again = exchange.asks_for_more();
            // Until everything received is stored and the client is read again.
            poll_fn(|context| {
                assert!(reading.as_mut().poll(context).is_pending());
                client_is_asked_again.as_mut().poll(context)
            })
            .await;
        });
        assert!(files_below(&directory).is_empty());
    }
}
