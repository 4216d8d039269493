//! Settings of a location for passing requests on, whatever the protocol: `proxy_read_timeout`, `fastcgi_read_timeout`
//! and so on are the same setting. (<https://nginx.org/en/docs/http/ngx_http_proxy_module.html>)

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use bstr::BString;
use gale_config::{Diagnostic, Setting};
use gale_protocol::proxy_protocol::Transport;
use gale_protocol::response::ResponseField;
use gale_runtime::{ConnectOptions, SocketAddress};
use gale_spool::TempPath;
use gale_tls::TlsClient;
use gale_tls::settings::TlsClientSettings;
use gale_upstream::{Bind, ProxyVersion};

use crate::cache::settings::CacheSettings;
use crate::request::Request;
use crate::request::response::FieldName;
use crate::request::variables::template::{SizeTemplate, Template, any_is_true};
use crate::upstream::store::StoreSettings;

/// Settings of a location. The names are those of the directives without the prefix of their module.
#[derive(Default)]
pub struct UpstreamSettings {
    /// Unique number, since connections may be kept for one location alone.
    pub id: usize,
    /// The local address of connections.
    pub bind: Setting<Option<Bind<Request>>>,
    /// Accepted; the local address is always evaluated for each attempt.
    pub bind_dynamic: Setting<bool>,
    /// The chosen server is used only if all values are non-empty and not `0`.
    pub allow_upstream: Setting<Vec<Vec<Template>>>,
    /// Version of the PROXY protocol header sent to servers.
    pub proxy_protocol: Setting<ProxyVersion>,
    /// `SO_KEEPALIVE`
    pub socket_keepalive: Setting<bool>,
    /// `SO_RCVBUF` in bytes; 0 for the kernel's default.
    pub socket_rcvbuf: Setting<u64>,
    /// `SO_SNDBUF` in bytes; 0 for the kernel's default.
    pub socket_sndbuf: Setting<u64>,
    /// Timeout for connecting.
    pub connect_timeout: Setting<Duration>,
    /// Timeout between two writes of a request.
    pub send_timeout: Setting<Duration>,
    /// Timeout between two reads of a response.
    pub read_timeout: Setting<Duration>,
    /// Timeout from the first attempt to the end of the response; 0 for none.
    pub request_timeout: Setting<Duration>,
    /// Conditions under which the next server is tried.
    pub next_upstream: Setting<RetryOn>,
    /// Maximum number of attempts; 0 for no limit.
    pub next_upstream_tries: Setting<u64>,
    /// Time limit for further attempts; 0 for none.
    pub next_upstream_timeout: Setting<Duration>,
    /// Maximum length of a response's head, in bytes.
    pub buffer_size: Setting<u64>,
    /// Number and size of the buffers for a response ahead of its client in memory.
    pub buffers: Setting<(u64, u64)>,
    /// Accepted without effect: the client's side bounds the data being sent.
    pub busy_buffers_size: Setting<u64>,
    /// Read responses ahead of the client.
    pub buffering: Setting<bool>,
    /// Write the request anew for each server.
    pub request_dynamic: Setting<bool>,
    /// Read the request's body completely first.
    pub request_buffering: Setting<bool>,
    /// Maximum length of a response's temporary file, in bytes.
    pub max_temp_file_size: Setting<u64>,
    /// Accepted without effect: the spool combines its writes.
    pub temp_file_write_size: Setting<u64>,
    /// Directory of temporary files.
    pub temp_path: Setting<TempPath>,
    /// Continue a request after its client has left.
    pub ignore_client_abort: Setting<bool>,
    /// Apply `error_page` to errors of the server, too.
    pub intercept_errors: Setting<bool>,
    /// Replace every 404 of the server by Gale's own.
    pub answers_not_found: bool,
    /// Support ranges even if the server does not announce them.
    pub force_ranges: Setting<bool>,
    /// Pass trailers of responses on.
    pub pass_trailers: Setting<bool>,
    /// Bytes of a response read per second; 0 for no limit.
    pub limit_rate: Setting<SizeTemplate>,
    /// Pass the client's fields on.
    pub pass_request_headers: Setting<bool>,
    /// Pass the request's body on.
    pub pass_request_body: Setting<bool>,
    /// Fields to hide, besides the default ones.
    pub hide_header: Setting<Vec<BString>>,
    /// Fields of the default ones that are not hidden.
    pub pass_header: Setting<Vec<BString>>,
    /// Pass the server's `Server` field on, and add none if it is missing.
    pub leaves_server_field: bool,
    /// Fields of a response that Gale ignores.
    pub ignore_headers: Setting<Vec<Ignored>>,
    /// Bits of `ignore_headers`.
    pub ignored: Ignored,
    /// TLS settings for connections to servers: `ssl_…`.
    pub tls: TlsClientSettings,
    /// Name for the server's certificate and SNI; by default the host of the URL.
    pub tls_name: Setting<Template>,
    /// Names of the client certificate and its key, if they contain variables.
    pub tls_certificate: Option<(Template, Template)>,
    /// The client made from `tls`, if connections may use TLS; set once the configuration is complete.
    pub tls_client: Option<Arc<OnceLock<Arc<TlsClient>>>>,
    /// Settings of the location's cache: `cache_…`.
    pub cache: CacheSettings,
    /// Settings for storing responses as files: `store`, `store_access`.
    pub store: StoreSettings,
    /// Conditions under which a stale response is used: `cache_use_stale`.
    pub cache_use_stale: Setting<RetryOn>,
    /// The fields to hide, from `hide_header` and `pass_header`.
    pub hidden: Arc<HiddenFields>,
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
            pub fn bits(self) -> u32 {
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
    /// Maximum length of a response's head, in bytes.
    pub fn head_max(&self) -> usize {
        usize::try_from(*self.buffer_size.get()).unwrap_or(usize::MAX)
    }

    /// Completes settings that have already inherited from the outer scope. `prefix` is that of the directives,
    /// `hidden` the fields hidden by default.
    ///
    /// # Errors
    /// Sizes that contradict each other, in nginx's words.
    pub fn complete(&mut self, prefix: &str, hidden: &[&str]) -> Result<(), Diagnostic> {
        static IDS: AtomicUsize = AtomicUsize::new(1);
        self.id = IDS.fetch_add(1, Ordering::Relaxed);
        let ignored = self.ignore_headers.get_opt().map(Vec::as_slice).unwrap_or_default();
        self.ignored = ignored.iter().fold(Ignored::default(), |all, more| all.or(*more));
        for of_some_modules in [&mut self.pass_trailers, &mut self.request_dynamic] {
            if !of_some_modules.is_set() {
                of_some_modules.set(false, None);
            }
        }
        let list = |setting: &Setting<Vec<BString>>| setting.get_opt().cloned().unwrap_or_default();
        self.hidden = Arc::new(HiddenFields::new(hidden, &list(&self.hide_header), &list(&self.pass_header)));
        let (count, size) = *self.buffers.get();
        let head = *self.buffer_size.get();
        let error = |setting_name: &str, text: String| Diagnostic::emerg(format!("\"{prefix}_{setting_name}\" {text}"));
        if count < 2 {
            return Err(error("buffers", "must be at least 2 buffers".to_owned()).at_opt(self.buffers.span()));
        }
        let largest = head.max(size);
        let busy = *self.busy_buffers_size.get_opt().unwrap_or(&0);
        let of_largest = format!(
            "must be equal to or greater than the maximum of the value of \"{prefix}_buffer_size\" and one of the \
             \"{prefix}_buffers\""
        );
        if busy != 0 && busy < largest {
            return Err(error("busy_buffers_size", of_largest).at_opt(self.busy_buffers_size.span()));
        }
        let all_but_one = size.saturating_mul(count - 1);
        let of_all = format!("must be less than the size of all \"{prefix}_buffers\" minus one buffer");
        if busy != 0 && busy > all_but_one {
            return Err(error("busy_buffers_size", of_all).at_opt(self.busy_buffers_size.span()));
        }
        let write = *self.temp_file_write_size.get_opt().unwrap_or(&0);
        if write != 0 && write < largest {
            return Err(error("temp_file_write_size", of_largest).at_opt(self.temp_file_write_size.span()));
        }
        let file_max = *self.max_temp_file_size.get();
        if file_max != 0 && file_max < largest {
            let text = format!("must be equal to zero to disable temporary files usage or {of_largest}");
            return Err(error("max_temp_file_size", text).at_opt(self.max_temp_file_size.span()));
        }
        Ok(())
    }

    /// True if this request may be passed to its chosen server.
    pub fn allows_server(&self, request: &Request) -> bool {
        let conditions = self.allow_upstream.get_opt().map(Vec::as_slice).unwrap_or_default();
        conditions.iter().flatten().all(|text| any_is_true(std::slice::from_ref(text), request))
    }

    /// The local address of connections for this request.
    pub fn local_address(&self, request: &Request) -> Option<SocketAddress> {
        self.bind.get_opt()?.as_ref()?.evaluate(request)
    }

    /// The PROXY protocol header of a connection for this request; empty for none.
    pub fn proxy_header(&self, request: &Request) -> Vec<u8> {
        match self.proxy_protocol.get_opt() {
            None | Some(ProxyVersion::Off) => Vec::new(),
            Some(version) => {
                let exchange = request.exchange();
                version.header(Transport::Stream, request.remote(), exchange.local_address(), exchange.tls())
            }
        }
    }

    /// True if a PROXY protocol header is sent.
    pub fn sends_proxy_header(&self) -> bool {
        !matches!(self.proxy_protocol.get_opt(), None | Some(ProxyVersion::Off))
    }

    /// Socket options and timeout of connections for this request.
    pub fn connect_options(&self, request: &Request) -> ConnectOptions {
        let mut options = ConnectOptions {
            keepalive: *self.socket_keepalive.get(),
            timeout: Some(*self.connect_timeout.get()),
            receive_buffer: size(*self.socket_rcvbuf.get()),
            send_buffer: size(*self.socket_sndbuf.get()),
            ..ConnectOptions::default()
        };
        if let Some(bind) = self.bind.get_opt().and_then(Option::as_ref) {
            options.local = bind.evaluate(request);
            options.transparent = bind.is_transparent;
        }
        options
    }

    /// Maximum number of bytes of a response ahead of its client in memory.
    pub fn buffers_bytes(&self) -> u64 {
        let (count, size) = *self.buffers.get();
        count.saturating_mul(size)
    }
}

fn size(bytes: u64) -> Option<usize> {
    usize::try_from(bytes).ok().filter(|&bytes| bytes > 0)
}
