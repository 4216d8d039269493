//! Settings of a location for passing requests on, in groups: `proxy_read_timeout`, `fastcgi_read_timeout` and so on
//! are the same setting. (<https://nginx.org/en/docs/http/ngx_http_proxy_module.html>)
//!
//! ```text
//!  connect, socket_buffers, http     the connection                         (connect.rs)
//!  exchange, deadline                times and the buffer of an exchange    (exchange.rs)
//!  retry, stale                      failures that are answered otherwise   (retry.rs)
//!  head                              fields of requests and responses       (head.rs)
//!  request_body, response_body       bodies                                 (body.rs)
//!  tls                               TLS to servers                         (tls.rs)
//!  cache, store                      copies of responses
//! ```
//!
//! A protocol names its groups (`protocol.rs`). A group that it lacks has fixed values, so a request reads the settings
//! of every protocol in the same way.

mod body;
mod connect;
mod exchange;
mod head;
mod protocol;
mod retry;
mod tls;

use std::sync::atomic::{AtomicUsize, Ordering};

use bstr::BString;
use gale_http::request::response::FieldName;
use gale_protocol::response::ResponseField;

pub use self::body::{RequestBodySettings, ResponseBodySettings};
pub use self::connect::{ConnectSettings, HttpServerSettings, SocketBufferSettings};
pub use self::exchange::{DeadlineSettings, ExchangeSettings};
pub use self::head::HeadSettings;
pub use self::protocol::{HasGroup, SettingsGroup, UpstreamOf, UpstreamProtocol};
pub use self::retry::{RetrySettings, StaleSettings};
pub use self::tls::ServerTlsSettings;
pub use crate::store_settings::StoreSettings;
pub use gale_http_cache::settings::CacheSettings;

/// Makes [`UpstreamSettings`] and its groups.
macro_rules! groups {
    ($($(#[$doc:meta])* $field:ident: $group:ty,)*) => {
        /// Settings of a location. The names are those of the directives without the prefix of their module.
        pub struct UpstreamSettings {
            /// Unique number, since connections may be kept for one location alone.
            pub id: usize,
            /// Replace every 404 of the server by Gale's own.
            pub answers_not_found: bool,
            $($(#[$doc])* pub $field: $group,)*
        }

        impl UpstreamSettings {
            /// The settings of a protocol without directives.
            pub fn without_groups() -> UpstreamSettings {
                UpstreamSettings {
                    id: 0,
                    answers_not_found: false,
                    $($field: <$group as SettingsGroup>::absent(),)*
                }
            }
        }

        $(impl protocol::PartOfSettings for $group {
            fn of(settings: &UpstreamSettings) -> &$group {
                &settings.$field
            }

            fn of_mut(settings: &mut UpstreamSettings) -> &mut $group {
                &mut settings.$field
            }
        })*
    };
}

groups! {
    /// Opening of connections.
    connect: ConnectSettings,
    /// Sizes of the kernel's buffers.
    socket_buffers: SocketBufferSettings,
    /// Settings of HTTP servers alone.
    http: HttpServerSettings,
    /// Timeouts between two reads or writes, and the buffer.
    exchange: ExchangeSettings,
    /// Time limit of a whole request.
    deadline: DeadlineSettings,
    /// Attempts with further servers.
    retry: RetrySettings,
    /// Use of stale responses.
    stale: StaleSettings,
    /// Fields of requests and responses.
    head: HeadSettings,
    /// Passing of the client's request.
    request_body: RequestBodySettings,
    /// Reading of responses ahead of the client.
    response_body: ResponseBodySettings,
    /// TLS to servers.
    tls: ServerTlsSettings,
    /// The location's cache.
    cache: CacheSettings,
    /// Storing of responses as files.
    store: StoreSettings,
}

macro_rules! bits {
    ($(#[$doc:meta])* $name:ident { $($(#[$flag_doc:meta])* $flag:ident = $bit:literal $text:literal,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct $name(u32);

        impl $name {
            $($(#[$flag_doc])* pub const $flag: $name = $name(1 << $bit);)*

            /// The words of a configuration, with their bits.
            pub const WORDS: &'static [(&'static str, u32)] = &[$(($text, 1 << $bit),)*];

            /// The value with these bits.
            pub fn of(bits: u32) -> $name {
                $name(bits)
            }

            /// Their bits.
            pub const fn bits(self) -> u32 {
                self.0
            }

            /// True if all bits of `other` are set.
            pub fn has(self, other: $name) -> bool {
                self.0 & other.0 == other.0
            }

            /// The union of both.
            #[must_use]
            pub const fn or(self, other: $name) -> $name {
                $name(self.0 | other.0)
            }
        }
    };
}

bits! {
    /// Conditions under which the next server is tried: `proxy_next_upstream`.
    RetryOn {
        /// Connecting, sending or receiving failed.
        ERROR = 0 "error",
        /// Connecting, sending or receiving timed out.
        TIMEOUT = 1 "timeout",
        /// The response is invalid.
        INVALID_HEADER = 2 "invalid_header",
        /// Includes requests that may have had an effect already.
        NON_IDEMPOTENT = 3 "non_idempotent",
        /// The response's status.
        HTTP_500 = 4 "http_500",
        /// The response's status.
        HTTP_502 = 5 "http_502",
        /// The response's status.
        HTTP_503 = 6 "http_503",
        /// The response's status.
        HTTP_504 = 7 "http_504",
        /// The response's status.
        HTTP_403 = 8 "http_403",
        /// The response's status.
        HTTP_404 = 9 "http_404",
        /// The response's status.
        HTTP_429 = 10 "http_429",
        /// For caches.
        UPDATING = 11 "updating",
        /// Never.
        OFF = 12 "off",
        /// `allow_upstream` denied the server.
        DENIED = 13 "denied",
    }
}

bits! {
    /// Fields of a response that Gale ignores: `proxy_ignore_headers`.
    Ignored {
        /// An internal redirect.
        X_ACCEL_REDIRECT = 0 "X-Accel-Redirect",
        /// For caches.
        X_ACCEL_EXPIRES = 1 "X-Accel-Expires",
        /// The rate to the client.
        X_ACCEL_LIMIT_RATE = 2 "X-Accel-Limit-Rate",
        /// Buffering of the response.
        X_ACCEL_BUFFERING = 3 "X-Accel-Buffering",
        /// The charset of the response.
        X_ACCEL_CHARSET = 4 "X-Accel-Charset",
        /// For caches.
        EXPIRES = 5 "Expires",
        /// For caches.
        CACHE_CONTROL = 6 "Cache-Control",
        /// For caches.
        SET_COOKIE = 7 "Set-Cookie",
        /// For caches.
        VARY = 8 "Vary",
    }
}

impl RetryOn {
    /// The flag of a response's status, if it has one.
    pub fn of_status(status: u16) -> Option<RetryOn> {
        Some(match status {
            500 => RetryOn::HTTP_500,
            502 => RetryOn::HTTP_502,
            503 => RetryOn::HTTP_503,
            504 => RetryOn::HTTP_504,
            403 => RetryOn::HTTP_403,
            404 => RetryOn::HTTP_404,
            429 => RetryOn::HTTP_429,
            _ => return None,
        })
    }
}

/// Fields of a response that are hidden from its client.
#[derive(Clone, Debug, Default)]
pub struct HiddenFields {
    /// A bit for each known field.
    known: u64,
    /// Other fields, in lower case.
    others: Box<[Box<[u8]>]>,
}

impl HiddenFields {
    /// The fields of `usual` and `hide` that are not in `pass`.
    pub fn new(usual: &[&str], hide: &[BString], pass: &[BString]) -> HiddenFields {
        let mut hidden = HiddenFields::default();
        let mut others: Vec<Box<[u8]>> = Vec::new();
        let is_passed = |name: &[u8]| pass.iter().any(|pass| pass.eq_ignore_ascii_case(name));
        let names = usual.iter().map(|name| name.as_bytes()).chain(hide.iter().map(|name| &***name));
        for name in names.filter(|name| !is_passed(name)) {
            match ResponseField::from_name(name) {
                Some(known) => hidden.known |= 1 << known as u8,
                None => others.push(name.to_ascii_lowercase().into()),
            }
        }
        hidden.others = others.into();
        hidden
    }

    /// True if a field with this name is hidden.
    pub fn has(&self, name: &FieldName) -> bool {
        match name.known() {
            Some(known) => self.known >> known as u8 & 1 == 1,
            None => self.others.iter().any(|other| other.eq_ignore_ascii_case(name)),
        }
    }
}

impl UpstreamSettings {
    /// Leaves a group to the directives of a protocol.
    pub fn begin<G: SettingsGroup>(&mut self) {
        *G::of_mut(self) = G::default();
    }

    /// Gives the location a number of its own.
    fn number(&mut self) {
        static IDS: AtomicUsize = AtomicUsize::new(1);
        self.id = IDS.fetch_add(1, Ordering::Relaxed);
    }
}
