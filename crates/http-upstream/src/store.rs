//! `proxy_store`: writes a response to a file, where the next request may find it.
//! (<https://nginx.org/en/docs/http/ngx_http_proxy_module.html#proxy_store>)
//!
//! ```text
//!  UpstreamBody ── pieces ──► Storing (a temporary file) ── whole ──► task beside the request: puts the file in place
//!       └── the client leaves: the rest of the body ───────────────► the same task reads it to its end first
//! ```
//!
//! A disk that fails, or is behind for too long, costs the file alone: the client gets the response.

use std::cell::RefCell;
use std::future::poll_fn;
use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::{Duration, UNIX_EPOCH};

use gale_base::http_date;
use gale_base::log_level::Level;
use gale_files::likely_device;
use gale_http::files::placing::{Content, Target, directory_permissions, place};
use gale_http::request::Request;
use gale_http::request::files::pool_of;
use gale_http::request::response::FieldList;
use gale_http::request::subrequest::{Copy, copy_in_background};
use gale_protocol::response::ResponseField;
use gale_runtime::{Bytes, Notify, ThreadPool, Timer, timeout};
use gale_spool::{Spool, SpoolOptions, SpoolPath};

use crate::passing::Passing;
use crate::receiving::UpstreamHead;
use crate::settings::UpstreamSettings;

/// Time for which the server waits for a disk that is behind.
const DISK_PATIENCE: Duration = Duration::from_secs(5);

/// A response being stored.
pub(super) struct Storing {
    spool: Spool,
    /// Runs while the disk is behind.
    patience: Timer,
    is_behind: bool,
    task: Teller,
}

/// The rest of a body, which is read only to be stored.
pub(super) trait Rest {
    /// Receives and stores a piece. `None` once the body has ended in any way.
    fn poll_piece(&mut self, request: &Request, context: &mut Context<'_>) -> Poll<Option<Bytes>>;
}

/// A message to the task.
enum Told {
    /// The spool has the whole response.
    Whole(Spool),
    /// The task has to read the rest, because the client has left.
    Rest(Box<dyn Rest>),
}

#[derive(Default)]
struct Channel {
    state: RefCell<State>,
    news: Notify,
}

#[derive(Default)]
struct State {
    told: Option<Told>,
    has_ended: bool,
    is_deaf: bool,
}

impl Channel {
    fn tell(&self, told: Told) {
        let before = self.state.borrow_mut().told.replace(told);
        drop(before);
        self.news.notify_one();
    }

    /// Takes the last message, and whether the sender is gone.
    fn take(&self) -> (Option<Told>, bool) {
        let mut state = self.state.borrow_mut();
        (state.told.take(), state.has_ended)
    }
}

/// The sender of messages to the task.
struct Teller(Rc<Channel>);

impl Drop for Teller {
    fn drop(&mut self) {
        self.0.state.borrow_mut().has_ended = true;
        self.0.news.notify_one();
    }
}

struct Listener(Rc<Channel>);

impl Listener {
    async fn hear(&self) -> Option<Told> {
        loop {
            let (told, has_ended) = self.0.take();
            if told.is_some() || has_ended {
                return told;
            }
            self.0.news.notified().await;
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        let mut state = self.0.state.borrow_mut();
        state.is_deaf = true;
        let told = state.told.take();
        drop(state);
        drop(told);
    }
}

/// Begins to store a response, if the location wants this one stored.
pub(super) fn begin(
    request: &Request,
    passing: &Passing<'_>,
    head: &UpstreamHead,
    fields: &FieldList,
) -> Option<Box<Storing>> {
    let settings: &UpstreamSettings = passing.settings;
    if !settings.store.is_on() || head.status != 200 || request.is_head() {
        return None;
    }
    let path = settings.store.path(request)?;
    let modified = fields.iter().find(|field| field.name.known() == Some(ResponseField::LastModified));
    let modified = modified.and_then(|field| http_date::parse(&field.value));
    let access = *settings.store.access.get();
    let target = Target {
        path,
        access,
        parents: Some(directory_permissions(access)),
        modified: modified.map(|seconds| UNIX_EPOCH + Duration::from_secs(seconds)),
        number: gale_runtime::random_u64() as u32,
    };
    let pool = pool_of(request);
    let options = SpoolOptions {
        memory_max: 0,
        length_max: None,
        place: SpoolPath::Named(settings.response_body.temp_path.get().clone()),
        pool: Some(pool.clone()),
    };
    let mut spool = Spool::new(options);
    spool.begin_file();
    let channel = Rc::new(Channel::default());
    let listener = Listener(Rc::clone(&channel));
    // A refusal is logged, and the response is not stored.
    copy_in_background(request, move |copy| finish(copy, listener, target, pool))
        .then(|| Box::new(Storing { spool, patience: Timer::new(), is_behind: false, task: Teller(channel) }))
}

/// The task: reads the rest if necessary, and puts the file in place.
async fn finish(request: Copy, listener: Listener, target: Target, pool: ThreadPool) {
    while let Some(told) = listener.hear().await {
        match told {
            Told::Rest(mut rest) => while poll_fn(|context| rest.poll_piece(&request, context)).await.is_some() {},
            Told::Whole(spool) => {
                put(&request, spool, target, &pool).await;
                return;
            }
        }
    }
}

async fn put(request: &Request, spool: Spool, target: Target, pool: &ThreadPool) {
    let stored = match timeout(DISK_PATIENCE, spool.finish()).await {
        Ok(Ok(stored)) => stored,
        Ok(Err(error)) => return request.log(Level::Crit, format_args!("{error} while storing a response")),
        Err(_) => return tell_of_delay(request),
    };
    let content = Content {
        name: stored.name().map(|name| name.to_path_buf()),
        memory: stored.memory(),
        file: stored.file().map(|file| (file, stored.file_length())),
    };
    let device = likely_device(&target.path).writes();
    match pool.run_for(device, move || place(&content, &target)).await {
        Ok(Ok(has_taken_name)) if has_taken_name => stored.keep(),
        Ok(Ok(_)) => {}
        Ok(Err(error)) => request.log(Level::Crit, format_args!("{error} while storing a response")),
        Err(refused) => request.log(Level::Alert, format_args!("{refused}")),
    }
}

fn tell_of_delay(request: &Request) {
    request.log(Level::Warn, format_args!("the disk is too slow, a response is not stored"));
}

impl Storing {
    /// Waits until there is room for another piece. False if storing has ended.
    pub fn poll_room(&mut self, request: &Request, context: &mut Context<'_>) -> Poll<bool> {
        match self.spool.poll_ready(context) {
            Poll::Ready(Ok(())) => {
                self.is_behind = false;
                Poll::Ready(true)
            }
            Poll::Ready(Err(error)) => {
                request.log(Level::Crit, format_args!("{error} while storing a response"));
                Poll::Ready(false)
            }
            Poll::Pending => {
                if !self.is_behind {
                    self.is_behind = true;
                    self.patience.set(gale_runtime::now() + DISK_PATIENCE);
                }
                if self.patience.poll_expired(context).is_pending() {
                    return Poll::Pending;
                }
                tell_of_delay(request);
                Poll::Ready(false)
            }
        }
    }

    /// Adds a piece. False if storing has ended.
    pub fn append(&mut self, request: &Request, piece: &Bytes) -> bool {
        match self.spool.append(piece.clone()) {
            Ok(()) => true,
            Err(error) => {
                request.log(Level::Crit, format_args!("{error} while storing a response"));
                false
            }
        }
    }

    /// Lets the task read the rest of the body, which the client does not want any more.
    pub fn read_on<R: Rest + 'static>(self: Box<Storing>, rest: impl FnOnce(Box<Storing>) -> R) {
        let channel = Rc::clone(&self.task.0);
        // If the task has ended, nothing is read.
        if !channel.state.borrow().is_deaf {
            channel.tell(Told::Rest(Box::new(rest(self))));
        }
    }

    /// Adds the only piece and ends.
    pub fn finish_with(mut self, request: &Request, piece: Option<&Bytes>) {
        if piece.is_none_or(|piece| self.append(request, piece)) {
            self.finish();
        }
    }

    /// Ends with the whole response stored.
    pub fn finish(self) {
        self.task.0.tell(Told::Whole(self.spool));
    }
}
