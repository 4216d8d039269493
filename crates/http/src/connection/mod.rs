//! Connections of clients. A connection is in one `Stage`.
//!
//! ```text
//!   accepted ─┬─► Beginning (beginning.rs) ─┬─► Http1 (http1/) ─┬─► Lingering (lingering.rs)
//!             └─► Tls (tls.rs) ─────────────┴─► Http2 (http2/) ─┘
//! ```
//!
//! A stage holds its own state alone; what all stages share is a `Client`. Each stage ends with a value that names
//! the next one, so a further version of HTTP is one more variant and one more folder. A connection in the stage
//! `Http1` is its own exchange, since it carries one at a time; the exchanges of HTTP/2 are its streams.

mod beginning;
mod body_wait;
mod client;
mod handover;
pub mod http1;
mod http2;
mod lingering;
mod output;
mod place;
mod tls;
pub mod worker;

use std::cell::{RefCell, RefMut};
use std::future::{Future, poll_fn};
use std::rc::{Rc, Weak};
use std::task::{Poll, ready};

use gale_engine::connections::{Connection, ConnectionInfo};
use gale_runtime::{Buffer, Moment};
use gale_tls::Transport;

use self::beginning::FirstBytes;
use self::client::Client;
use self::http1::AfterExchange;
use self::http2::Http2;
use crate::connection::worker::HttpConnections;
use crate::request::worker::Configured;

/// A connection of a client.
pub struct HttpConnection {
    client: Client,
    stage: RefCell<Stage>,
}

/// Stage of a connection, with the state that belongs to that stage alone.
enum Stage {
    /// The first bytes are awaited, which tell the version. The PROXY protocol's header stands before them, where the
    /// address wants one.
    Beginning(FirstBytes),
    /// The first bytes at an address with TLS, and the handshake.
    Tls,
    Http1(http1::State),
    /// HTTP/2 comes next; the part of its preface that has come.
    Preface(Box<Buffer>),
    /// The task of the connection owns the state.
    Http2(Weak<Http2>),
    /// The last response has left, and the connection is read from until the client has seen it.
    Lingering {
        /// True if it carried several exchanges at once.
        was_multiplexed: bool,
    },
}

/// Result of the first stage: the next one, with its first state.
enum Begun {
    Http1(http1::State),
    /// HTTP/2, and the part of its preface that has come.
    Http2(Buffer),
    /// The client has left, was silent for too long, or gets no answer.
    Closed,
}

/// The rest of a connection that has begun.
enum Next {
    /// Requests of HTTP/1, one after another. They are served by the connection's own future, which is small.
    Requests,
    /// The stage of HTTP/2, to the end of the connection.
    Http2,
    End,
}

impl Connection for HttpConnection {
    /// `None` while the connection is busy.
    fn may_close_at(&self) -> Option<Moment> {
        // An HTTP/2 connection ends by itself when the worker does: its client is told before.
        if !self.client.is_idle() || self.client.worker().is_draining() && self.is_multiplexed() {
            return None;
        }
        Some(self.client.idle_may_close_at())
    }
}

impl HttpConnection {
    /// A connection that was just accepted.
    pub fn new(info: ConnectionInfo, stream: Transport, connections: Rc<HttpConnections>) -> HttpConnection {
        let stage = match stream.tls() {
            Some(_) => Stage::Tls,
            None => Stage::Beginning(FirstBytes::default()),
        };
        HttpConnection { client: Client::new(info, stream, connections), stage: RefCell::new(stage) }
    }

    /// Returns `true` if the connection carries several exchanges at once. Its client is told before it ends.
    pub fn is_multiplexed(&self) -> bool {
        matches!(*self.stage.borrow(), Stage::Http2(_) | Stage::Lingering { was_multiplexed: true })
    }

    /// Generation of the oldest configuration of an exchange under way, if there is any.
    pub fn exchange_generation(&self) -> Option<u64> {
        match &*self.stage.borrow() {
            Stage::Http1(http1) => http1.generation(),
            Stage::Http2(http2) => http2.upgrade()?.oldest_generation(),
            Stage::Beginning(_) | Stage::Tls | Stage::Preface(_) | Stage::Lingering { .. } => None,
        }
    }

    /// Wakes the task of a connection that tells its client before it ends.
    fn wake_if_multiplexed(&self) {
        if let Stage::Http2(http2) = &*self.stage.borrow()
            && let Some(http2) = http2.upgrade()
        {
            http2.wake();
        }
    }

    /// Returns `true` if the configuration still has the address that the connection came by.
    pub fn has_place(&self, configuration: &Configured) -> bool {
        self.client.place(configuration.http()).is_some()
    }

    /// State of the stage `Http1`.
    fn http1(&self) -> RefMut<'_, http1::State> {
        RefMut::map(self.stage.borrow_mut(), |stage| match stage {
            Stage::Http1(http1) => http1,
            _ => unreachable!("only a connection in the stage `Http1` is an exchange"),
        })
    }

    /// Leaves the current stage, whose state ends here.
    fn enter(&self, stage: Stage) {
        *self.stage.borrow_mut() = stage;
    }

    /// Passes the first stage.
    fn pass_beginning(self: &Rc<Self>) -> impl Future<Output = Next> {
        let mut tls = self.client.stream.tls().map(|_| Box::pin(tls::begin(self)));
        poll_fn(move |context| {
            let begun = match &mut tls {
                Some(tls) => ready!(tls.as_mut().poll(context)),
                None => ready!(self.poll_beginning(context)),
            };
            Poll::Ready(self.follow(begun))
        })
    }

    /// Enters the stage that follows the beginning.
    fn follow(&self, begun: Begun) -> Next {
        match begun {
            Begun::Http1(state) => {
                self.enter(Stage::Http1(state));
                Next::Requests
            }
            Begun::Http2(input) => {
                self.enter(Stage::Preface(Box::new(input)));
                Next::Http2
            }
            Begun::Closed => Next::End,
        }
    }

    async fn serve_http2(self: Rc<Self>) {
        let Stage::Preface(input) = self.stage.replace(Stage::Lingering { was_multiplexed: true }) else { return };
        if let Some(lingering) = http2::serve(Rc::clone(&self), *input).await {
            self.linger(lingering).await;
        }
    }

    /// Serves the connection to its end, stage by stage. (A block, because the future of an `async fn` would hold
    /// its arguments twice.)
    #[expect(clippy::manual_async_fn, reason = "the future of an `async fn` would be larger")]
    pub fn serve(self: Rc<Self>) -> impl Future<Output = ()> {
        async move {
            let next = self.pass_beginning().await;
            match next {
                Next::Requests => {}
                Next::Http2 => return Box::pin(self.serve_http2()).await,
                Next::End => return,
            }
            while let Some(request) = self.next_request().await {
                match self.exchange(request).await {
                    AfterExchange::KeepAlive if self.must_yield() => gale_runtime::yield_now().await,
                    AfterExchange::KeepAlive => {}
                    AfterExchange::Close => return,
                    AfterExchange::Linger(lingering) => return Box::pin(self.linger(lingering)).await,
                }
            }
        }
    }
}

impl Drop for HttpConnection {
    fn drop(&mut self) {
        if let Stage::Http1(http1) = self.stage.get_mut() {
            http1.end(&self.client.stream, &self.client.connections);
        }
    }
}
