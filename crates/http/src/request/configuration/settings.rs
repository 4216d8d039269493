//! The settings of nginx's http core module, which the engine itself reads.
//!
//! The directive table that fills them is in `gale-modules` `http/core/`; this file has only their types.
//! (<https://nginx.org/en/docs/http/ngx_http_core_module.html>)

use std::sync::Arc;
use std::time::Duration;

use gale_config::Setting;
use gale_engine::configuration::KnownPath;
use gale_files::RefusedLinks;
use gale_log::Destination;
use gale_resolver::ResolverSettings;
use gale_worker::traffic::Traffic;
use hashbrown::HashMap;

use crate::files::open_files::OpenFileCache;
use crate::request::files::thread_pool::PoolName;
use crate::request::post_action::PostAction;
use crate::request::slow::SlowRequestLog;
use crate::request::variables::template::{SizeTemplate, Template};

pub use gale_spool::TempPath;

/// One scope's settings; every field is the directive of the same name unless
/// it says otherwise. Times are durations, sizes are bytes.
#[derive(Default)]
#[allow(missing_docs, reason = "the fields are nginx's directives")]
pub struct CoreSettings {
    // Settings of a server, needed before a location is known.
    pub client_header_buffer_size: Setting<usize>,
    pub large_client_header_buffers: Setting<HeaderBuffers>,
    pub client_header_timeout: Setting<Duration>,
    pub ignore_invalid_headers: Setting<bool>,
    pub underscores_in_headers: Setting<bool>,
    pub merge_slashes: Setting<bool>,
    pub max_headers: Setting<usize>,

    // Reading the request's body.
    pub client_max_body_size: Setting<u64>,
    pub client_body_buffer_size: Setting<usize>,
    pub client_body_timeout: Setting<Duration>,
    pub client_body_min_rate: Setting<Option<MinRate>>,
    pub client_body_temp_path: Setting<TempPath>,
    pub client_body_in_file_only: Setting<BodyInFile>,
    pub client_body_in_single_buffer: Setting<bool>,

    // The connection.
    pub send_timeout: Setting<Duration>,
    pub keepalive_timeout: Setting<KeepaliveTimeout>,
    pub keepalive_disable: Setting<KeepaliveDisable>,
    pub keepalive_requests: Setting<u64>,
    pub keepalive_time: Setting<Duration>,
    pub keepalive_min_timeout: Setting<Duration>,
    pub limit_rate: Setting<SizeTemplate>,
    pub limit_rate_after: Setting<SizeTemplate>,
    pub lingering_close: Setting<LingeringClose>,
    pub lingering_time: Setting<Duration>,
    pub lingering_timeout: Setting<Duration>,
    pub reset_timedout_connection: Setting<bool>,
    pub tcp_nodelay: Setting<bool>,
    pub tcp_nopush: Setting<bool>,

    /// `status_zone` of a location; `None` for `off`.
    pub location_zone: Setting<Option<Arc<Traffic>>>,

    /// `slow_request_log`; `None` for `off`.
    pub slow_request_log: Setting<Option<SlowRequestLog>>,

    // Files.
    pub root: Setting<Root>,
    pub disable_symlinks: Setting<DisableSymlinks>,
    pub sendfile: Setting<bool>,
    pub sendfile_max_chunk: Setting<u64>,
    pub open_file_cache: Setting<OpenFileCache>,
    pub open_file_cache_valid: Setting<Duration>,
    pub open_file_cache_min_uses: Setting<u64>,
    pub open_file_cache_errors: Setting<bool>,
    pub open_file_cache_events: Setting<bool>,
    pub aio: Setting<Aio>,
    /// `u64::MAX` for `off`.
    pub directio: Setting<u64>,
    pub directio_alignment: Setting<u32>,
    pub output_buffers: Setting<HeaderBuffers>,
    pub postpone_output: Setting<u64>,
    pub read_ahead: Setting<u64>,
    /// Accepted; has no effect on Linux.
    pub send_lowat: Setting<u64>,

    // Resolution of names.
    pub resolver: Setting<Arc<ResolverSettings>>,
    pub resolver_timeout: Setting<Duration>,

    // Access.
    pub satisfy: Setting<Satisfy>,
    pub auth_delay: Setting<Duration>,

    // The answer.
    pub internal: Setting<bool>,
    pub default_type: Setting<Box<[u8]>>,
    pub types: Setting<Arc<Types>>,
    pub early_hints: Setting<Vec<Template>>,
    pub error_page: Setting<Vec<ErrorPage>>,
    pub recursive_error_pages: Setting<bool>,
    pub msie_padding: Setting<bool>,
    pub msie_refresh: Setting<bool>,
    pub server_tokens: Setting<ServerTokens>,
    pub etag: Setting<bool>,
    pub if_modified_since: Setting<IfModifiedSince>,
    pub max_ranges: Setting<u64>,
    pub chunked_transfer_encoding: Setting<bool>,
    pub absolute_redirect: Setting<bool>,
    pub server_name_in_redirect: Setting<bool>,
    pub port_in_redirect: Setting<bool>,
    pub subrequest_output_buffer_size: Setting<usize>,

    // Logs.
    pub log_not_found: Setting<bool>,
    pub log_subrequest: Setting<bool>,
    pub post_action: Setting<PostAction>,
    pub error_log: Setting<Vec<Destination>>,
}

/// `large_client_header_buffers` and `output_buffers`: number and size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeaderBuffers {
    /// Number of buffers; times the size, the limit on the whole head.
    pub count: usize,
    /// Size of one buffer: the limit on the request line and on every field.
    pub size: usize,
}

/// `aio auto|on|off|threads[=POOL]`: the way a piece of a file that is not in memory is read.
#[derive(Clone, Debug)]
pub enum Aio {
    /// By the pool `default`; pieces in memory never go there.
    Auto,
    /// By io_uring.
    On,
    /// By the event loop, which waits for the disk, as in nginx by default.
    Off,
    /// By this pool; without a name, by `default`.
    Threads(Option<PoolName>),
}

/// `keepalive_timeout TIMEOUT [HEADER_TIMEOUT]`
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeepaliveTimeout {
    /// Maximum idle time of a connection; zero turns keep-alive off.
    pub idle: Duration,
    /// Value of the `Keep-Alive` field; zero leaves the field out. Inherited from the enclosing scope if it is not
    /// written, even if the first parameter is.
    pub advertised: Option<Duration>,
}

impl KeepaliveTimeout {
    /// Returns the time for the `Keep-Alive` field, or `None` without the field.
    pub fn told(&self) -> Option<Duration> {
        self.advertised.filter(|time| !time.is_zero())
    }
}

/// `keepalive_disable none|msie6|safari ...`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KeepaliveDisable {
    /// Internet Explorer up to 6, after a POST.
    pub msie6: bool,
    /// Safari on macOS.
    pub safari: bool,
}

/// `client_body_min_rate RATE [after=TIME]`
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MinRate {
    /// Minimum average rate of the client, in bytes per second.
    pub bytes_per_second: u64,
    /// Waiting time allowed in addition.
    pub grace: Duration,
}

/// `satisfy all|any`
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Satisfy {
    /// Every module of the access phase has to let the client in.
    All,
    /// One of them is enough.
    Any,
}

/// `lingering_close off|on|always`
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LingeringClose {
    /// Close at once.
    Off,
    /// Read on for a while when the client is probably still sending.
    On,
    /// Always read on.
    Always,
}

/// `if_modified_since off|exact|before`
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IfModifiedSince {
    /// The field is ignored.
    Off,
    /// Only the very same time counts as unchanged.
    Exact,
    /// Any time not before the file's counts as unchanged.
    Before,
}

/// `server_tokens`: contents of the `Server` field.
#[derive(Clone, Debug)]
pub enum ServerTokens {
    /// Name and version.
    On,
    /// The name alone.
    Off,
    /// Name, version and the name of the build.
    Build,
    /// Any text; an empty one leaves the field out.
    Text(Template),
}

/// `root` or `alias`, of which a location has one.
#[derive(Clone, Debug)]
pub struct Root {
    /// The directory.
    pub path: Template,
    /// The program's prefix, for a path whose variables decide whether it is relative.
    pub base: Option<Box<[u8]>>,
    /// Given by `alias`.
    pub alias: Option<Alias>,
}

impl Root {
    /// Returns the part of the directory that is known without a request.
    pub fn known_path(&self) -> KnownPath<'_> {
        self.path.known_path()
    }
}

/// Part of the URI that `alias` replaces: that of the location with the directive, also in locations that inherit it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Alias {
    /// This beginning of the URI.
    Prefix(Box<[u8]>),
    /// All of the URI: in a location with a regular expression.
    Whole,
}

/// `disable_symlinks off | on [from=PART] | if_not_owner [from=PART]`
#[derive(Clone, Debug, Default)]
pub struct DisableSymlinks {
    /// Symbolic links that are refused, if any.
    pub refused: Option<RefusedLinks>,
    /// The beginning of paths that is not checked.
    pub from: Option<Template>,
}

/// `client_body_in_file_only on|clean|off`
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BodyInFile {
    /// Only the part that does not fit into memory; the file has no name.
    Off,
    /// The whole body, in a file that is kept.
    On,
    /// The whole body, in a file that is removed with the request.
    Clean,
}

/// `types { }`: from a file name's extension, in lower case, to a media type.
#[derive(Debug, Default)]
pub struct Types(pub HashMap<Box<[u8]>, Box<[u8]>>);

impl Types {
    /// The media type for an extension, whatever its case.
    pub fn find(&self, extension: &[u8]) -> Option<&[u8]> {
        if extension.iter().any(u8::is_ascii_uppercase) {
            return self.0.get(&*extension.to_ascii_lowercase()).map(|found| &**found);
        }
        self.0.get(extension).map(|found| &**found)
    }
}

/// One code of one `error_page` directive.
#[derive(Clone, Debug)]
pub struct ErrorPage {
    /// Status that the page replaces.
    pub status: u16,
    /// Status of the response.
    pub answer: ErrorPageStatus,
    /// Target of the request: a URI with or without arguments, a named location, or a full URL.
    pub target: Template,
}

/// `error_page CODE ... [=[RESPONSE]] URI`
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorPageStatus {
    /// The status stays.
    Keep,
    /// `=RESPONSE`
    Replace(u16),
    /// `=`: the status from the new location.
    OfTarget,
}
