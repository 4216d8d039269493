//! What a location says about passing requests on, whatever the protocol: `proxy_read_timeout`, `fastcgi_read_timeout`
//! and so on are the same setting.
//! (<https://nginx.org/en/docs/http/ngx_http_proxy_module.html>)

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use bstr::BString;
use gale_config::{Diagnostic, Setting};
use gale_engine::spool::TempPath;
use gale_engine::tls::TlsClient;
use gale_engine::tls::settings::TlsClientSettings;
use gale_engine::upstream::{Bind, ProxyVersion};
use gale_protocol::proxy_protocol::Transport;
use gale_protocol::response::ResponseField;
use gale_runtime::{ConnectOptions, SocketAddress};

use crate::cache::settings::CacheSettings;
use crate::request::Request;
use crate::request::response::FieldName;
use crate::request::variables::template::{SizeTemplate, Template, any_is_true};
use crate::upstream::store::StoreSettings;

/// See the file's head. The names are those of the directives without the prefix of their module.
#[derive(Default)]
pub struct UpstreamSettings {
    /// Tells them apart from all others that there were: connections may be kept for one location alone.
    pub id: usize,
    /// The address to connect from.
    pub bind: Setting<Option<Bind<Request>>>,
    /// Checked: the address to connect from is always that of the attempt.
    pub bind_dynamic: Setting<bool>,
    /// Texts of which none may be empty or `0`, or the server that was chosen is not connected to.
    pub allow_upstream: Setting<Vec<Vec<Template>>>,
    /// Which header of the PROXY protocol servers get.
    pub proxy_protocol: Setting<ProxyVersion>,
    /// `SO_KEEPALIVE`
    pub socket_keepalive: Setting<bool>,
    /// `SO_RCVBUF` in bytes, 0 for the kernel's.
    pub socket_rcvbuf: Setting<u64>,
    /// `SO_SNDBUF` in bytes, 0 for the kernel's.
    pub socket_sndbuf: Setting<u64>,
    /// How long connecting may take.
    pub connect_timeout: Setting<Duration>,
    /// How long a server may take nothing of a request.
    pub send_timeout: Setting<Duration>,
    /// How long a server may be silent.
    pub read_timeout: Setting<Duration>,
    /// How long all of it may take, from the first server that is tried to the end of the response; zero for ever.
    pub request_timeout: Setting<Duration>,
    /// When the next server is tried.
    pub next_upstream: Setting<RetryOn>,
    /// How many servers are tried, 0 for all.
    pub next_upstream_tries: Setting<u64>,
    /// For how long the next server is tried, zero for ever.
    pub next_upstream_timeout: Setting<Duration>,
    /// How long the head of a response may be, in bytes.
    pub buffer_size: Setting<u64>,
    /// How many buffers of which size a response may be ahead of its client in memory.
    pub buffers: Setting<(u64, u64)>,
    /// Checked, and without a meaning of its own: what is being sent is bounded by the client's side.
    pub busy_buffers_size: Setting<u64>,
    /// Whether a response is read as fast as it comes.
    pub buffering: Setting<bool>,
    /// Whether what servers are asked is written anew for each of them.
    pub request_dynamic: Setting<bool>,
    /// Whether a request's body is read to its end first.
    pub request_buffering: Setting<bool>,
    /// How long the temporary file of a response may become, in bytes.
    pub max_temp_file_size: Setting<u64>,
    /// Checked, and without a meaning of its own: the spool gathers what it writes.
    pub temp_file_write_size: Setting<u64>,
    /// Where temporary files are.
    pub temp_path: Setting<TempPath>,
    /// Whether a request goes on when its client has left.
    pub ignore_client_abort: Setting<bool>,
    /// Whether `error_page` is for the errors of the server, too.
    pub intercept_errors: Setting<bool>,
    /// Whether the answer to a 404 of the server is always Gale's own.
    pub answers_not_found: bool,
    /// Whether parts of a response can be had although the server offers none.
    pub force_ranges: Setting<bool>,
    /// Whether the fields behind a response's body are passed on.
    pub pass_trailers: Setting<bool>,
    /// How many bytes of a response are read in a second, 0 for no limit.
    pub limit_rate: Setting<SizeTemplate>,
    /// Whether the client's fields are passed on.
    pub pass_request_headers: Setting<bool>,
    /// Whether the request's body is passed on.
    pub pass_request_body: Setting<bool>,
    /// Fields that the client does not get, besides the usual ones.
    pub hide_header: Setting<Vec<BString>>,
    /// Fields that the client does get although they are among the usual ones.
    pub pass_header: Setting<Vec<BString>>,
    /// Whether `Server` is the server's own alone: Gale adds none.
    pub leaves_server_field: bool,
    /// Fields that have no effect on Gale.
    pub ignore_headers: Setting<Vec<Ignored>>,
    /// What follows from `ignore_headers`.
    pub ignored: Ignored,
    /// What is asked of servers that are spoken to over TLS: `ssl_…`.
    pub tls: TlsClientSettings,
    /// The name that a server's certificate is to have, and that the server is told; else the host of the URL.
    pub tls_name: Setting<Template>,
    /// The names of the certificate that is shown to servers and of its key, if they have variables.
    pub tls_certificate: Option<(Template, Template)>,
    /// What `tls` comes to, where connections may be over TLS; there once the configuration is complete.
    pub tls_client: Option<Arc<OnceLock<Arc<TlsClient>>>>,
    /// What the location says about its cache: `cache_…`.
    pub cache: CacheSettings,
    /// Whether responses become files: `store`, `store_access`.
    pub store: StoreSettings,
    /// When something stale is used: `cache_use_stale`.
    pub cache_use_stale: Setting<RetryOn>,
    /// What follows from `hide_header` and `pass_header`.
    pub hidden: Arc<HiddenFields>,
}

macro_rules! bits {
    ($(#[$doc:meta])* $name:ident { $($(#[$flag_doc:meta])* $flag:ident = $bit:literal $text:literal,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct $name(u32);

        impl $name {
            $($(#[$flag_doc])* pub const $flag: $name = $name(1 << $bit);)*

            /// The words that a configuration has for them, with their bits.
            pub const WORDS: &'static [(&'static str, u32)] = &[$(($text, 1 << $bit),)*];

            /// Those of a directive's words.
            pub fn of(bits: u32) -> $name {
                $name(bits)
            }

            /// Their bits.
            pub fn bits(self) -> u32 {
                self.0
            }

            /// Whether all of `other` are among them.
            pub fn has(self, other: $name) -> bool {
                self.0 & other.0 == other.0
            }

            /// These and those.
            #[must_use]
            pub const fn or(self, other: $name) -> $name {
                $name(self.0 | other.0)
            }
        }
    };
}

bits! {
    /// When the next server is tried: `proxy_next_upstream`.
    RetryOn {
        /// Connecting, sending or receiving failed.
        ERROR = 0 "error",
        /// One of them took too long.
        TIMEOUT = 1 "timeout",
        /// What came is no response.
        INVALID_HEADER = 2 "invalid_header",
        /// Also for a request that may have had an effect already.
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
        /// `allow_upstream` denies the server.
        DENIED = 13 "denied",
    }
}

bits! {
    /// Fields of a response that have no effect on Gale: `proxy_ignore_headers`.
    Ignored {
        /// An internal redirect.
        X_ACCEL_REDIRECT = 0 "X-Accel-Redirect",
        /// For caches.
        X_ACCEL_EXPIRES = 1 "X-Accel-Expires",
        /// The rate to the client.
        X_ACCEL_LIMIT_RATE = 2 "X-Accel-Limit-Rate",
        /// Whether the response is buffered.
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
    /// What a response's status is called in the directive, if it has a name there.
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

/// Fields of a response that its client does not get.
#[derive(Clone, Debug, Default)]
pub struct HiddenFields {
    /// The bit of each known field.
    known: u64,
    /// The others, in lower case.
    others: Box<[Box<[u8]>]>,
}

impl HiddenFields {
    /// Those of `usual` and `hide` that are not among `pass`.
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

    /// Whether a field with this name is among them.
    pub fn has(&self, name: &FieldName) -> bool {
        match name.known() {
            Some(known) => self.known >> known as u8 & 1 == 1,
            None => self.others.iter().any(|other| other.eq_ignore_ascii_case(name)),
        }
    }
}

impl UpstreamSettings {
    /// How long the head of a response may be, in bytes.
    pub fn head_max(&self) -> usize {
        usize::try_from(*self.buffer_size.get()).unwrap_or(usize::MAX)
    }

    /// Completes settings that have taken over what they do not say from `parent`. `prefix` is that of the directives,
    /// `hidden` what clients never get unless it is passed by name.
    ///
    /// # Errors
    /// Sizes that do not fit together, in nginx's words.
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

    /// Whether this request may be passed to the server that was chosen for it.
    pub fn allows_server(&self, request: &Request) -> bool {
        let conditions = self.allow_upstream.get_opt().map(Vec::as_slice).unwrap_or_default();
        conditions.iter().flatten().all(|text| any_is_true(std::slice::from_ref(text), request))
    }

    /// The address that connections for this request come from.
    pub fn local_address(&self, request: &Request) -> Option<SocketAddress> {
        self.bind.get_opt()?.as_ref()?.evaluate(request)
    }

    /// The header of the PROXY protocol that a connection for this request begins with; empty for none.
    pub fn proxy_header(&self, request: &Request) -> Vec<u8> {
        match self.proxy_protocol.get_opt() {
            None | Some(ProxyVersion::Off) => Vec::new(),
            Some(version) => {
                let exchange = request.exchange();
                version.header(Transport::Stream, request.remote(), exchange.local_address(), exchange.tls())
            }
        }
    }

    /// Whether there is one.
    pub fn sends_proxy_header(&self) -> bool {
        !matches!(self.proxy_protocol.get_opt(), None | Some(ProxyVersion::Off))
    }

    /// How connections are made for this request.
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

    /// How much of a response may be ahead of its client in memory, in bytes.
    pub fn buffers_bytes(&self) -> u64 {
        let (count, size) = *self.buffers.get();
        count.saturating_mul(size)
    }
}

fn size(bytes: u64) -> Option<usize> {
    usize::try_from(bytes).ok().filter(|&bytes| bytes > 0)
}
