//! http core: servers, locations, and what every request lives by.
//!   http { server { listen ...; server_name ...; location ... { } } }
//!   root, alias, types, error_page, keepalive_timeout, client_max_body_size, ...
//! (<https://nginx.org/en/docs/http/ngx_http_core_module.html>)

use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;
use std::time::Duration;

use bstr::ByteSlice;
use gale_base::log_level::Level;
use gale_base::units;
use gale_config::{
    Body, Contexts, Custom, Diagnostic, ManyWith, One, OneWith, Statement, Takes, Updated, Word, slot, values,
};
use gale_engine::configuration::{Builder, MainSettings, ScopeRef};
use gale_engine::module::{ConfType, Directive, Module};
use gale_engine::resolver::ResolverSettings;
use gale_engine::traffic::Traffic;
use gale_http::configuration::builder;
use gale_http::configuration::builder::InHttp;
use gale_http::configuration::settings::{
    Aio, Alias, BodyInFile, CoreSettings, DisableSymlinks, ErrorPage, ErrorPageStatus, HeaderBuffers, IfModifiedSince,
    KeepaliveDisable, KeepaliveTimeout, LingeringClose, MinRate, Root, Satisfy, ServerTokens, TempPath, Types,
};
use gale_http::module::HttpPart;
use gale_http::request::files::open_files::{OpenFileCache, Store};
use gale_http::request::files::thread_pool::PoolName;
use gale_http::request::post_action::PostAction;
use gale_http::request::slow::SlowRequestLog;
use gale_http::variables::template::{SizeTemplate, Template};
use gale_runtime::files::RefusedLinks;

use crate::core::log_level;
use crate::shared::figures;

/// See the file's head.
pub static MODULE: Module = Module {
    name: "http_core",
    directives: DIRECTIVES,
    conf: Some(ConfType { merge, ..ConfType::of::<CoreSettings>() }),
    parts: &[&HttpPart { variables: super::variables::VARIABLES, ..HttpPart::EMPTY }],
};

const DIRECTIVES: &[Directive] = &[
    Directive {
        name: "http",
        contexts: Contexts::MAIN,
        takes: Takes::Exactly(0),
        body: Body::Block,
        default: "",
        about: "Everything that is served over HTTP.",
        store: &Custom(|_: &mut (), builder, statement| builder::http_block(builder, statement)),
    },
    Directive {
        name: "server",
        contexts: Contexts::HTTP,
        takes: Takes::Exactly(0),
        body: Body::Block,
        default: "",
        about: "A virtual server.",
        store: &Custom(|_: &mut (), builder, statement| builder::server_block(builder, statement)),
    },
    Directive {
        name: "location",
        contexts: Contexts::SERVER.or(Contexts::LOCATION),
        takes: Takes::Between(1, 2),
        body: Body::Block,
        default: "",
        about: "Settings for a part of the URIs.",
        store: &Custom(|_: &mut (), builder, statement| builder::location_block(builder, statement)),
    },
    Directive {
        name: "listen",
        contexts: Contexts::SERVER,
        takes: Takes::AtLeast(1),
        body: Body::None,
        default: "*:80 | *:8000",
        about: "An address that the server answers on; without any it is port 80 for root, and 8000 for others.",
        store: &Custom(|_: &mut (), builder, statement| builder::listen(builder, statement)),
    },
    Directive {
        name: "server_name",
        contexts: Contexts::SERVER,
        takes: Takes::AtLeast(1),
        body: Body::None,
        default: "",
        about: "The host names that the server answers for.",
        store: &Custom(|_: &mut (), builder, statement| builder::server_name(builder, statement)),
    },
    Directive {
        name: "client_header_buffer_size",
        contexts: Contexts::HTTP.or(Contexts::SERVER),
        takes: Takes::Exactly(1),
        body: Body::None,
        default: "1k",
        about: "Memory for a usual request head, taken when its first byte comes.",
        store: &One { parse: size, slot: slot!(CoreSettings, client_header_buffer_size) },
    },
    Directive {
        name: "large_client_header_buffers",
        contexts: Contexts::HTTP.or(Contexts::SERVER),
        takes: Takes::Exactly(2),
        body: Body::None,
        default: "4 8k",
        about: "How many buffers, and how large, a large head may take; a line must fit in one.",
        store: &One { parse: header_buffers, slot: slot!(CoreSettings, large_client_header_buffers) },
    },
    Directive {
        name: "client_header_timeout",
        contexts: Contexts::HTTP.or(Contexts::SERVER),
        takes: Takes::Exactly(1),
        body: Body::None,
        default: "60s",
        about: "How long a client may take for the head of a request.",
        store: &One { parse: values::time_ms, slot: slot!(CoreSettings, client_header_timeout) },
    },
    Directive {
        name: "ignore_invalid_headers",
        contexts: Contexts::HTTP.or(Contexts::SERVER),
        takes: Takes::Flag,
        body: Body::None,
        default: "on",
        about: "Whether fields with strange names are left out instead of refused.",
        store: &One { parse: values::flag, slot: slot!(CoreSettings, ignore_invalid_headers) },
    },
    Directive {
        name: "underscores_in_headers",
        contexts: Contexts::HTTP.or(Contexts::SERVER),
        takes: Takes::Flag,
        body: Body::None,
        default: "off",
        about: "Whether names of fields may have underscores.",
        store: &One { parse: values::flag, slot: slot!(CoreSettings, underscores_in_headers) },
    },
    Directive {
        name: "merge_slashes",
        contexts: Contexts::HTTP.or(Contexts::SERVER),
        takes: Takes::Flag,
        body: Body::None,
        default: "on",
        about: "Whether several slashes in a URI count as one.",
        store: &One { parse: values::flag, slot: slot!(CoreSettings, merge_slashes) },
    },
    Directive {
        name: "max_headers",
        contexts: Contexts::HTTP.or(Contexts::SERVER),
        takes: Takes::Exactly(1),
        body: Body::None,
        default: "1000",
        about: "How many fields a request may have.",
        store: &One { parse: count, slot: slot!(CoreSettings, max_headers) },
    },
    Directive {
        name: "client_max_body_size",
        contexts: Contexts::ANYWHERE,
        takes: Takes::Exactly(1),
        body: Body::None,
        default: "1m",
        about: "How large a request's body may be; 0 for any size.",
        store: &One { parse: values::offset, slot: slot!(CoreSettings, client_max_body_size) },
    },
    Directive {
        name: "client_body_buffer_size",
        contexts: Contexts::ANYWHERE,
        takes: Takes::Exactly(1),
        body: Body::None,
        default: "16k",
        about: "How much of a request's body is kept in memory; the rest goes to a file.",
        store: &One { parse: size_or_none, slot: slot!(CoreSettings, client_body_buffer_size) },
    },
    Directive {
        name: "client_body_timeout",
        contexts: Contexts::ANYWHERE,
        takes: Takes::Exactly(1),
        body: Body::None,
        default: "60s",
        about: "How long a client may be silent while it sends a body.",
        store: &One { parse: values::time_ms, slot: slot!(CoreSettings, client_body_timeout) },
    },
    Directive {
        name: "client_body_min_rate",
        contexts: Contexts::ANYWHERE,
        takes: Takes::Between(1, 2),
        body: Body::None,
        default: "0",
        about: "How many bytes a second a client has to send of a body in the mean, after 10s or after=TIME; 0 for any.",
        store: &One { parse: min_rate, slot: slot!(CoreSettings, client_body_min_rate) },
    },
    Directive {
        name: "client_body_temp_path",
        contexts: Contexts::ANYWHERE,
        takes: Takes::Between(1, 4),
        body: Body::None,
        default: "",
        about: "Where bodies that are too large for memory are kept; else /var/lib/gale/body (or /var/lib/nginx/body).",
        store: &OneWith { parse: temp_path, slot: slot!(CoreSettings, client_body_temp_path) },
    },
    Directive {
        name: "client_body_in_file_only",
        contexts: Contexts::ANYWHERE,
        takes: Takes::Exactly(1),
        body: Body::None,
        default: "off",
        about: "Whether bodies go to files as a whole: off, on, or clean, which removes them with the request.",
        store: &One { parse: body_in_file, slot: slot!(CoreSettings, client_body_in_file_only) },
    },
    Directive {
        name: "client_body_in_single_buffer",
        contexts: Contexts::ANYWHERE,
        takes: Takes::Flag,
        body: Body::None,
        default: "off",
        about: "Whether what is kept of a body in memory is one piece.",
        store: &One { parse: values::flag, slot: slot!(CoreSettings, client_body_in_single_buffer) },
    },
    Directive {
        name: "send_timeout",
        contexts: Contexts::ANYWHERE,
        takes: Takes::Exactly(1),
        body: Body::None,
        default: "60s",
        about: "How long a client may take nothing of a response.",
        store: &One { parse: values::time_ms, slot: slot!(CoreSettings, send_timeout) },
    },
    Directive {
        name: "keepalive_timeout",
        contexts: Contexts::ANYWHERE,
        takes: Takes::Between(1, 2),
        body: Body::None,
        default: "75s",
        about: "How long an idle connection is kept, and what the client is told.",
        store: &One { parse: keepalive_timeout, slot: slot!(CoreSettings, keepalive_timeout) },
    },
    Directive {
        name: "keepalive_disable",
        contexts: Contexts::ANYWHERE,
        takes: Takes::AtLeast(1),
        body: Body::None,
        default: "msie6",
        about: "Browsers that mishandle kept connections: none, msie6 or safari.",
        store: &Updated { parse: keepalive_disable, slot: slot!(CoreSettings, keepalive_disable) },
    },
    Directive {
        name: "keepalive_requests",
        contexts: Contexts::ANYWHERE,
        takes: Takes::Exactly(1),
        body: Body::None,
        default: "1000",
        about: "How many requests a connection may carry.",
        store: &One { parse: values::number, slot: slot!(CoreSettings, keepalive_requests) },
    },
    Directive {
        name: "keepalive_time",
        contexts: Contexts::ANYWHERE,
        takes: Takes::Exactly(1),
        body: Body::None,
        default: "1h",
        about: "How long a connection may carry requests.",
        store: &One { parse: values::time_ms, slot: slot!(CoreSettings, keepalive_time) },
    },
    Directive {
        name: "keepalive_min_timeout",
        contexts: Contexts::ANYWHERE,
        takes: Takes::Exactly(1),
        body: Body::None,
        default: "0",
        about: "How long a connection stays open, even when the server stops or is short of connections.",
        store: &One { parse: values::time_ms, slot: slot!(CoreSettings, keepalive_min_timeout) },
    },
    Directive {
        name: "limit_rate",
        contexts: Contexts::ANYWHERE.or(Contexts::IF_IN_LOCATION),
        takes: Takes::Exactly(1),
        body: Body::None,
        default: "0",
        about: "How many bytes of a response go out in a second; 0 for no limit.",
        store: &OneWith { parse: size_template, slot: slot!(CoreSettings, limit_rate) },
    },
    Directive {
        name: "limit_rate_after",
        contexts: Contexts::ANYWHERE.or(Contexts::IF_IN_LOCATION),
        takes: Takes::Exactly(1),
        body: Body::None,
        default: "0",
        about: "How much of a response goes out before limit_rate applies.",
        store: &OneWith { parse: size_template, slot: slot!(CoreSettings, limit_rate_after) },
    },
    Directive {
        name: "lingering_close",
        contexts: Contexts::ANYWHERE,
        takes: Takes::Exactly(1),
        body: Body::None,
        default: "on",
        about: "Whether a client that is still sending is read from before the connection is closed.",
        store: &One { parse: lingering_close, slot: slot!(CoreSettings, lingering_close) },
    },
    Directive {
        name: "lingering_time",
        contexts: Contexts::ANYWHERE,
        takes: Takes::Exactly(1),
        body: Body::None,
        default: "30s",
        about: "How long a closing connection is read from at most.",
        store: &One { parse: values::time_ms, slot: slot!(CoreSettings, lingering_time) },
    },
    Directive {
        name: "lingering_timeout",
        contexts: Contexts::ANYWHERE,
        takes: Takes::Exactly(1),
        body: Body::None,
        default: "5s",
        about: "How long a closing connection may be silent.",
        store: &One { parse: values::time_ms, slot: slot!(CoreSettings, lingering_timeout) },
    },
    Directive {
        name: "reset_timedout_connection",
        contexts: Contexts::ANYWHERE,
        takes: Takes::Flag,
        body: Body::None,
        default: "off",
        about: "Whether connections that timed out are reset instead of closed.",
        store: &One { parse: values::flag, slot: slot!(CoreSettings, reset_timedout_connection) },
    },
    Directive {
        name: "tcp_nodelay",
        contexts: Contexts::ANYWHERE,
        takes: Takes::Flag,
        body: Body::None,
        default: "on",
        about: "Whether small packets leave at once.",
        store: &One { parse: values::flag, slot: slot!(CoreSettings, tcp_nodelay) },
    },
    Directive {
        name: "tcp_nopush",
        contexts: Contexts::ANYWHERE,
        takes: Takes::Flag,
        body: Body::None,
        default: "off",
        about: "Whether head and file leave in full packets.",
        store: &One { parse: values::flag, slot: slot!(CoreSettings, tcp_nopush) },
    },
    Directive {
        name: "sendfile",
        contexts: Contexts::ANYWHERE.or(Contexts::IF_IN_LOCATION),
        takes: Takes::Flag,
        body: Body::None,
        default: "off",
        about: "Whether files go from the page cache to the socket without passing through the program.",
        store: &One { parse: values::flag, slot: slot!(CoreSettings, sendfile) },
    },
    Directive {
        name: "sendfile_max_chunk",
        contexts: Contexts::ANYWHERE,
        takes: Takes::Exactly(1),
        body: Body::None,
        default: "2m",
        about: "How much of a file is sent in one call.",
        store: &One { parse: values::size, slot: slot!(CoreSettings, sendfile_max_chunk) },
    },
    Directive {
        name: "open_file_cache",
        contexts: Contexts::ANYWHERE,
        takes: Takes::Between(1, 2),
        body: Body::None,
        default: "",
        // nginx's is "off", which here says more than nothing.
        about: "How many files are kept, and how long without use; off keeps none; when not said, some in demand.",
        store: &One { parse: open_file_cache, slot: slot!(CoreSettings, open_file_cache) },
    },
    Directive {
        name: "open_file_cache_valid",
        contexts: Contexts::ANYWHERE,
        takes: Takes::Exactly(1),
        body: Body::None,
        default: "60s",
        about: "How long what the cache of open files says is believed.",
        store: &One { parse: values::time_s, slot: slot!(CoreSettings, open_file_cache_valid) },
    },
    Directive {
        name: "open_file_cache_min_uses",
        contexts: Contexts::ANYWHERE,
        takes: Takes::Exactly(1),
        body: Body::None,
        default: "1",
        about: "From which use on a file is kept open.",
        store: &One { parse: values::number, slot: slot!(CoreSettings, open_file_cache_min_uses) },
    },
    Directive {
        name: "open_file_cache_errors",
        contexts: Contexts::ANYWHERE,
        takes: Takes::Flag,
        body: Body::None,
        default: "off",
        about: "Whether the cache of open files remembers what was not found or not allowed.",
        store: &One { parse: values::flag, slot: slot!(CoreSettings, open_file_cache_errors) },
    },
    Directive {
        name: "open_file_cache_events",
        contexts: Contexts::ANYWHERE,
        takes: Takes::Flag,
        body: Body::None,
        default: "off",
        about: "Whether what the kernel watches is believed until it tells of a change, however long.",
        store: &One { parse: values::flag, slot: slot!(CoreSettings, open_file_cache_events) },
    },
    Directive {
        name: "aio",
        contexts: Contexts::ANYWHERE,
        takes: Takes::Exactly(1),
        body: Body::None,
        // nginx's is "off": there nobody can tell what is in memory.
        default: "auto",
        about: "What reads the pieces of files that are not in memory: auto, on, off, threads or threads=POOL.",
        store: &OneWith { parse: aio, slot: slot!(CoreSettings, aio) },
    },
    Directive {
        name: "directio",
        contexts: Contexts::ANYWHERE,
        takes: Takes::Exactly(1),
        body: Body::None,
        default: "off",
        about: "From which size on files are read past the page cache.",
        store: &One { parse: directio, slot: slot!(CoreSettings, directio) },
    },
    Directive {
        name: "directio_alignment",
        contexts: Contexts::ANYWHERE,
        takes: Takes::Exactly(1),
        body: Body::None,
        default: "512",
        about: "How reads past the page cache are aligned; 4096 at least.",
        store: &One { parse: alignment, slot: slot!(CoreSettings, directio_alignment) },
    },
    Directive {
        name: "output_buffers",
        contexts: Contexts::ANYWHERE,
        takes: Takes::Exactly(2),
        body: Body::None,
        default: "2 32k",
        about: "How much of a file is read at once: number of buffers and size of each.",
        store: &One { parse: header_buffers, slot: slot!(CoreSettings, output_buffers) },
    },
    Directive {
        name: "postpone_output",
        contexts: Contexts::ANYWHERE,
        takes: Takes::Exactly(1),
        body: Body::None,
        default: "1460",
        about: "How much is gathered before it is sent, if more is there at once.",
        store: &One { parse: values::size, slot: slot!(CoreSettings, postpone_output) },
    },
    Directive {
        name: "read_ahead",
        contexts: Contexts::ANYWHERE,
        takes: Takes::Exactly(1),
        body: Body::None,
        default: "0",
        about: "Whether the kernel is told that files are read from one end to the other.",
        store: &One { parse: values::size, slot: slot!(CoreSettings, read_ahead) },
    },
    Directive {
        name: "send_lowat",
        contexts: Contexts::ANYWHERE,
        takes: Takes::Exactly(1),
        body: Body::None,
        // nginx's is "0"; written out it is warned of.
        default: "",
        about: "Has no meaning on Linux; 0 when not said.",
        store: &OneWith { parse: send_lowat, slot: slot!(CoreSettings, send_lowat) },
    },
    Directive {
        name: "root",
        contexts: Contexts::ANYWHERE.or(Contexts::IF_IN_LOCATION),
        takes: Takes::Exactly(1),
        body: Body::None,
        default: "html",
        about: "The directory that URIs are appended to.",
        store: &OneWith { parse: root, slot: slot!(CoreSettings, root) },
    },
    Directive {
        name: "alias",
        contexts: Contexts::LOCATION,
        takes: Takes::Exactly(1),
        body: Body::None,
        default: "",
        about: "The directory that takes the place of the location's prefix.",
        store: &Custom(alias),
    },
    Directive {
        name: "disable_symlinks",
        contexts: Contexts::ANYWHERE,
        takes: Takes::Between(1, 2),
        body: Body::None,
        default: "off",
        about: "Which symbolic links on the way to a file are refused: none, all, or those of other owners than the file's.",
        store: &OneWith { parse: disable_symlinks, slot: slot!(CoreSettings, disable_symlinks) },
    },
    Directive {
        name: "internal",
        contexts: Contexts::LOCATION,
        takes: Takes::Exactly(0),
        body: Body::None,
        default: "",
        about: "Only redirects of the server's own reach the location.",
        store: &Custom(internal),
    },
    Directive {
        name: "satisfy",
        contexts: Contexts::ANYWHERE,
        takes: Takes::Exactly(1),
        body: Body::None,
        default: "all",
        about: "Whether all modules of the access phase have to let a client in, or any.",
        store: &One { parse: satisfy, slot: slot!(CoreSettings, satisfy) },
    },
    Directive {
        name: "auth_delay",
        contexts: Contexts::ANYWHERE,
        takes: Takes::Exactly(1),
        body: Body::None,
        default: "0s",
        about: "How long a client without the right password waits for the answer.",
        store: &One { parse: values::time_ms, slot: slot!(CoreSettings, auth_delay) },
    },
    Directive {
        name: "limit_except",
        contexts: Contexts::LOCATION,
        takes: Takes::AtLeast(1),
        body: Body::Block,
        default: "",
        about: "Who may use methods other than these.",
        store: &Custom(|_: &mut (), builder, statement| builder::limit_except(builder, statement)),
    },
    Directive {
        name: "default_type",
        contexts: Contexts::ANYWHERE,
        takes: Takes::Exactly(1),
        body: Body::None,
        default: "text/plain",
        about: "The media type of files whose extension says nothing.",
        store: &One { parse: text, slot: slot!(CoreSettings, default_type) },
    },
    Directive {
        name: "types",
        contexts: Contexts::ANYWHERE,
        takes: Takes::Exactly(0),
        body: Body::Block,
        default: "",
        about: "Media types by the extensions of file names.",
        store: &Custom(types),
    },
    Directive {
        name: "early_hints",
        contexts: Contexts::ANYWHERE,
        takes: Takes::AtLeast(1),
        body: Body::None,
        default: "",
        about: "Responses 103 are passed on if any of these texts is neither empty nor 0.",
        store: &Custom(early_hints),
    },
    Directive {
        name: "error_page",
        contexts: Contexts::ANYWHERE.or(Contexts::IF_IN_LOCATION),
        takes: Takes::AtLeast(2),
        body: Body::None,
        default: "",
        about: "What is answered instead of an error.",
        store: &Custom(error_page),
    },
    Directive {
        name: "recursive_error_pages",
        contexts: Contexts::ANYWHERE,
        takes: Takes::Flag,
        body: Body::None,
        default: "off",
        about: "Whether an error page may lead to another one.",
        store: &One { parse: values::flag, slot: slot!(CoreSettings, recursive_error_pages) },
    },
    Directive {
        name: "post_action",
        contexts: Contexts::ANYWHERE.or(Contexts::IF_IN_LOCATION),
        takes: Takes::Exactly(1),
        body: Body::None,
        default: "",
        about: "A path or named location that is asked in the background when a request is over.",
        store: &One { parse: post_action, slot: slot!(CoreSettings, post_action) },
    },
    Directive {
        name: "msie_padding",
        contexts: Contexts::ANYWHERE,
        takes: Takes::Flag,
        body: Body::None,
        default: "on",
        about: "Whether pages of errors are made long enough for MSIE and Chrome to show them.",
        store: &One { parse: values::flag, slot: slot!(CoreSettings, msie_padding) },
    },
    Directive {
        name: "msie_refresh",
        contexts: Contexts::ANYWHERE,
        takes: Takes::Flag,
        body: Body::None,
        default: "off",
        about: "Whether MSIE gets a page that leads on instead of a redirect.",
        store: &One { parse: values::flag, slot: slot!(CoreSettings, msie_refresh) },
    },
    Directive {
        name: "server_tokens",
        contexts: Contexts::ANYWHERE,
        takes: Takes::Exactly(1),
        body: Body::None,
        default: "on",
        about: "What the Server field says: on, off, build, or any text.",
        store: &OneWith { parse: server_tokens, slot: slot!(CoreSettings, server_tokens) },
    },
    Directive {
        name: "etag",
        contexts: Contexts::ANYWHERE,
        takes: Takes::Flag,
        body: Body::None,
        default: "on",
        about: "Whether files are given an ETag.",
        store: &One { parse: values::flag, slot: slot!(CoreSettings, etag) },
    },
    Directive {
        name: "if_modified_since",
        contexts: Contexts::ANYWHERE,
        takes: Takes::Exactly(1),
        body: Body::None,
        default: "exact",
        about: "How the time in If-Modified-Since is compared.",
        store: &One { parse: if_modified_since, slot: slot!(CoreSettings, if_modified_since) },
    },
    Directive {
        name: "max_ranges",
        contexts: Contexts::ANYWHERE,
        takes: Takes::Exactly(1),
        body: Body::None,
        default: "2147483647",
        about: "How many ranges a request may ask for; more, and the whole is sent. 0 turns ranges off.",
        store: &One { parse: values::number, slot: slot!(CoreSettings, max_ranges) },
    },
    Directive {
        name: "chunked_transfer_encoding",
        contexts: Contexts::ANYWHERE,
        takes: Takes::Flag,
        body: Body::None,
        default: "on",
        about: "Whether HTTP/1.1 responses of unknown length are sent in chunks.",
        store: &One { parse: values::flag, slot: slot!(CoreSettings, chunked_transfer_encoding) },
    },
    Directive {
        name: "absolute_redirect",
        contexts: Contexts::ANYWHERE,
        takes: Takes::Flag,
        body: Body::None,
        default: "on",
        about: "Whether redirects name scheme and host.",
        store: &One { parse: values::flag, slot: slot!(CoreSettings, absolute_redirect) },
    },
    Directive {
        name: "server_name_in_redirect",
        contexts: Contexts::ANYWHERE,
        takes: Takes::Flag,
        body: Body::None,
        default: "off",
        about: "Whether redirects name the server's own name instead of the host asked for.",
        store: &One { parse: values::flag, slot: slot!(CoreSettings, server_name_in_redirect) },
    },
    Directive {
        name: "port_in_redirect",
        contexts: Contexts::ANYWHERE,
        takes: Takes::Flag,
        body: Body::None,
        default: "on",
        about: "Whether redirects name the port.",
        store: &One { parse: values::flag, slot: slot!(CoreSettings, port_in_redirect) },
    },
    Directive {
        name: "resolver",
        contexts: Contexts::ANYWHERE,
        takes: Takes::AtLeast(1),
        body: Body::None,
        default: "",
        about: "The name servers that requests' names are asked of, with valid=TIME, ipv4=on|off, ipv6=on|off.",
        store: &OneWith {
            parse: |builder, statement| ResolverSettings::parse(builder, statement).map(Arc::new),
            slot: slot!(CoreSettings, resolver),
        },
    },
    Directive {
        name: "resolver_timeout",
        contexts: Contexts::ANYWHERE,
        takes: Takes::Exactly(1),
        body: Body::None,
        default: "30s",
        about: "How long a request waits for a name to be resolved; 0 for ever.",
        store: &One { parse: values::time_ms, slot: slot!(CoreSettings, resolver_timeout) },
    },
    Directive {
        name: "status_zone",
        contexts: Contexts::SERVER,
        takes: Takes::Exactly(1),
        body: Body::None,
        default: "",
        about: "The zone that the server's requests are counted in.",
        store: &Custom(|_: &mut (), builder, statement| server_zone(builder, statement)),
    },
    Directive {
        name: "status_zone",
        contexts: Contexts::LOCATION.or(Contexts::IF_IN_LOCATION),
        takes: Takes::Exactly(1),
        body: Body::None,
        default: "",
        about: "The zone that requests are counted in that end here; off for none.",
        store: &OneWith { parse: location_zone, slot: slot!(CoreSettings, location_zone) },
    },
    Directive {
        name: "slow_request_log",
        contexts: Contexts::ANYWHERE,
        takes: Takes::Between(1, 2),
        body: Body::None,
        default: "off",
        about: "A line in the error log, at this level (warn), for requests that take longer: with where the time went.",
        store: &OneWith { parse: slow_request_log, slot: slot!(CoreSettings, slow_request_log) },
    },
    Directive {
        name: "log_subrequest",
        contexts: Contexts::ANYWHERE,
        takes: Takes::Flag,
        body: Body::None,
        default: "off",
        about: "Whether subrequests are written to the access log.",
        store: &One { parse: values::flag, slot: slot!(CoreSettings, log_subrequest) },
    },
    Directive {
        name: "subrequest_output_buffer_size",
        contexts: Contexts::ANYWHERE,
        takes: Takes::Exactly(1),
        body: Body::None,
        default: "4k",
        about: "How large the body of a subrequest may be that is kept in memory.",
        store: &One { parse: size_or_none, slot: slot!(CoreSettings, subrequest_output_buffer_size) },
    },
    Directive {
        name: "log_not_found",
        contexts: Contexts::ANYWHERE,
        takes: Takes::Flag,
        body: Body::None,
        default: "on",
        about: "Whether files that do not exist are worth a message.",
        store: &One { parse: values::flag, slot: slot!(CoreSettings, log_not_found) },
    },
    Directive {
        name: "error_log",
        contexts: Contexts::ANYWHERE,
        takes: Takes::AtLeast(1),
        body: Body::None,
        default: "",
        about: "Where messages go, from which level on, in which form; may be repeated; else as in the main context.",
        store: &ManyWith { parse: crate::core::error_log, slot: slot!(CoreSettings, error_log) },
    },
];

/// What no row says: `types` and `error_log` have defaults that are no text.
fn merge(
    conf: &mut dyn std::any::Any,
    parent: Option<&dyn std::any::Any>,
    builder: &mut Builder,
) -> Result<(), Diagnostic> {
    let core: &mut CoreSettings = conf.downcast_mut().expect("the core module's settings");
    let parent: Option<&CoreSettings> = parent.and_then(|parent| parent.downcast_ref());
    match parent {
        Some(parent) => {
            core.types.inherit(&parent.types);
            core.error_page.inherit(&parent.error_page);
            core.early_hints.inherit(&parent.early_hints);
            core.internal.inherit(&parent.internal);
            if let (Some(own), Some(around)) = (core.keepalive_timeout.get_mut(), parent.keepalive_timeout.get_opt()) {
                own.advertised = own.advertised.or(around.advertised);
            }
        }
        None => {
            if !core.client_body_temp_path.is_set() {
                let path = builder.default_body_temp_path();
                core.client_body_temp_path.set(TempPath { path: path.into(), levels: Default::default() }, None);
            }
            if core.error_log.get().is_empty() {
                let main = builder.main_conf::<MainSettings>().map(|main| main.error_log.get().clone());
                core.error_log.set(main.unwrap_or_default(), None);
            }
        }
    }
    if !core.types.is_set() {
        core.types.set(Arc::new(default_types()), None);
    }
    if !core.error_page.is_set() {
        core.error_page.set(Vec::new(), None);
    }
    if !core.early_hints.is_set() {
        core.early_hints.set(Vec::new(), None);
    }
    if !core.internal.is_set() {
        core.internal.set(false, None);
    }
    Ok(())
}

fn size(statement: &Statement) -> Result<usize, Diagnostic> {
    match size_or_none(statement)? {
        0 => Err(statement.directive_error("invalid value").at(statement.args[0].span)),
        size => Ok(size),
    }
}

/// A size, or 0 for no buffer at all.
fn size_or_none(statement: &Statement) -> Result<usize, Diagnostic> {
    let fitting = usize::try_from(values::size(statement)?).ok().filter(|&size| size <= SIZE_MAX);
    fitting.ok_or_else(|| statement.directive_error("invalid value").at(statement.args[0].span))
}

/// Buffers larger than this are a slip of the pen.
const SIZE_MAX: usize = 1 << 30;

pub(crate) fn size_template(builder: &mut Builder, statement: &Statement) -> Result<SizeTemplate, Diagnostic> {
    crate::shared::size_template(builder, statement)
}

/// `RATE [after=TIME]`
fn min_rate(statement: &Statement) -> Result<Option<MinRate>, Diagnostic> {
    let bytes_per_second = values::size(statement)?;
    let grace = match statement.args.get(1) {
        None => MIN_RATE_GRACE,
        Some(word) => {
            let time = word.text.strip_prefix(b"after=").and_then(units::parse_time);
            time.ok_or_else(|| {
                let error = Diagnostic::emerg(format!("invalid parameter \"{}\"", word.text)).at(word.span);
                error.hint("the second argument is after=TIME")
            })?
        }
    };
    Ok((bytes_per_second > 0).then_some(MinRate { bytes_per_second, grace }))
}

/// A slow start is no attack.
const MIN_RATE_GRACE: Duration = Duration::from_secs(10);

fn satisfy(statement: &Statement) -> Result<Satisfy, Diagnostic> {
    values::enumeration(statement, &[("all", Satisfy::All), ("any", Satisfy::Any)])
}

fn count(statement: &Statement) -> Result<usize, Diagnostic> {
    let number = values::number(statement)?;
    Ok(usize::try_from(number).unwrap_or(usize::MAX))
}

fn text(statement: &Statement) -> Result<Box<[u8]>, Diagnostic> {
    Ok(statement.args[0].text.as_slice().into())
}

fn header_buffers(statement: &Statement) -> Result<HeaderBuffers, Diagnostic> {
    let (count, size) = values::buffers(statement)?;
    let fitting = |number: u64| usize::try_from(number).ok().filter(|&number| number <= SIZE_MAX);
    match (fitting(count), fitting(size)) {
        (Some(count), Some(size)) => Ok(HeaderBuffers { count, size }),
        _ => Err(statement.directive_error("invalid value")),
    }
}

fn aio(builder: &mut Builder, statement: &Statement) -> Result<Aio, Diagnostic> {
    let word = &statement.args[0];
    Ok(match &**word.text {
        b"auto" => Aio::Auto,
        b"on" => Aio::On,
        b"off" => Aio::Off,
        b"threads" => Aio::Threads(None),
        text => match text.strip_prefix(b"threads=") {
            Some(name) => Aio::Threads(Some(PoolName::new(builder, &Word { text: name.into(), ..word.clone() })?)),
            None => {
                let hint = "it is auto, on, off, threads or threads=POOL";
                return Err(statement.directive_error("invalid value").at(word.span).hint(hint));
            }
        },
    })
}

fn directio(statement: &Statement) -> Result<u64, Diagnostic> {
    if statement.args[0].text == "off" { Ok(u64::MAX) } else { values::offset(statement) }
}

/// A power of two, which the kernel wants anyway.
fn alignment(statement: &Statement) -> Result<u32, Diagnostic> {
    let alignment = values::offset(statement)?;
    let fitting = u32::try_from(alignment).ok().filter(|alignment| (1..=ALIGNMENT_MAX).contains(alignment));
    fitting.ok_or_else(|| statement.directive_error("invalid value").at(statement.args[0].span))
}

/// No device has larger blocks.
const ALIGNMENT_MAX: u32 = 1 << 20;

/// `send_lowat`, and that of connections to servers. nginx says the same on Linux.
pub(crate) fn send_lowat(builder: &mut Builder, statement: &Statement) -> Result<u64, Diagnostic> {
    let size = values::size(statement)?;
    let message = format!("\"{}\" is not supported, ignored", statement.name.text);
    builder.note([Diagnostic::warn(message).at(statement.span)]);
    Ok(size)
}

pub(crate) fn temp_path(builder: &mut Builder, statement: &Statement) -> Result<TempPath, Diagnostic> {
    let level = |word: &Word| match units::parse_number(&word.text) {
        Some(length @ 1..=3) => Ok(length as u8),
        _ => Err(statement.directive_error("invalid value").at(word.span).hint("a level has 1 to 3 characters")),
    };
    let levels = statement.args[1..].iter().map(level).collect::<Result<_, _>>()?;
    Ok(TempPath { path: builder.full_path(&statement.args[0].text).into(), levels })
}

fn keepalive_timeout(statement: &Statement) -> Result<KeepaliveTimeout, Diagnostic> {
    let advertised = match statement.args.get(1) {
        Some(word) => {
            let time = units::parse_time_seconds(&word.text);
            Some(time.ok_or_else(|| statement.directive_error("invalid value").at(word.span))?)
        }
        None => None,
    };
    Ok(KeepaliveTimeout { idle: values::time_ms(statement)?, advertised })
}

fn keepalive_disable(
    builder: &mut Builder,
    statement: &Statement,
    earlier: Option<&KeepaliveDisable>,
) -> Result<KeepaliveDisable, Diagnostic> {
    const MSIE6: u32 = 1;
    const SAFARI: u32 = 1 << 1;
    const NONE: u32 = 1 << 2;
    let bit = |is_set, bit| if is_set { bit } else { 0 };
    let earlier = earlier.map(|earlier| bit(earlier.msie6, MSIE6) | bit(earlier.safari, SAFARI));
    let choices = [("none", NONE), ("msie6", MSIE6), ("safari", SAFARI)];
    let bits = values::bitmask(statement, &choices, earlier.as_ref(), builder)?;
    Ok(KeepaliveDisable { msie6: bits & MSIE6 != 0, safari: bits & SAFARI != 0 })
}

fn body_in_file(statement: &Statement) -> Result<BodyInFile, Diagnostic> {
    let choices = [("off", BodyInFile::Off), ("on", BodyInFile::On), ("clean", BodyInFile::Clean)];
    values::enumeration(statement, &choices)
}

fn lingering_close(statement: &Statement) -> Result<LingeringClose, Diagnostic> {
    let choices = [("off", LingeringClose::Off), ("on", LingeringClose::On), ("always", LingeringClose::Always)];
    values::enumeration(statement, &choices)
}

fn if_modified_since(statement: &Statement) -> Result<IfModifiedSince, Diagnostic> {
    let choices =
        [("off", IfModifiedSince::Off), ("exact", IfModifiedSince::Exact), ("before", IfModifiedSince::Before)];
    values::enumeration(statement, &choices)
}

fn server_tokens(builder: &mut Builder, statement: &Statement) -> Result<ServerTokens, Diagnostic> {
    let word = &statement.args[0];
    Ok(match &**word.text {
        b"on" => ServerTokens::On,
        b"off" => ServerTokens::Off,
        b"build" => ServerTokens::Build,
        _ => ServerTokens::Text(builder.http_mut().template(word)?),
    })
}

fn root(builder: &mut Builder, statement: &Statement) -> Result<Root, Diagnostic> {
    directory(builder, statement, None)
}

/// Shares the slot of `root`, whose row inherits and completes it.
fn alias(core: &mut CoreSettings, builder: &mut Builder, statement: &Statement) -> Result<(), Diagnostic> {
    if let Some(earlier) = core.root.get_opt() {
        let duplicate = match earlier.alias {
            Some(_) => statement.directive_error("is duplicate"),
            None => statement.directive_error("is duplicate, \"root\" directive was specified earlier"),
        };
        return Err(match core.root.span() {
            Some(first) => duplicate.related("first set", first),
            None => duplicate,
        });
    }
    let alias = match builder.scope {
        ScopeRef::Block(scope) => builder.http_mut().alias_of(scope),
        ScopeRef::Main => None,
    };
    let alias =
        alias.ok_or_else(|| statement.error("the \"alias\" directive cannot be used inside the named location"))?;
    core.root.set(directory(builder, statement, Some(alias))?, Some(statement.span));
    Ok(())
}

fn directory(builder: &mut Builder, statement: &Statement, alias: Option<Alias>) -> Result<Root, Diagnostic> {
    let word = &statement.args[0];
    for (refused, braced) in [("document_root", "{document_root}"), ("realpath_root", "{realpath_root}")] {
        if word.text.split_str("$").skip(1).any(|rest| rest.starts_with_str(refused) || rest.starts_with_str(braced)) {
            let name = &statement.name.text;
            let message = format!("the ${refused} variable cannot be used in the \"{name}\" directive");
            return Err(Diagnostic::emerg(message).at(word.span));
        }
    }
    let mut path = word.clone();
    if alias.is_none() && path.text.len() > 1 && path.text.ends_with(b"/") {
        path.text.pop();
    }
    let mut base = None;
    if path.text.starts_with(b"$") {
        base = Some(builder.full_path(b"").as_os_str().as_bytes().strip_suffix(b"/").unwrap_or_default().into());
    } else {
        path.text = builder.full_path(&path.text).as_os_str().as_bytes().into();
    }
    Ok(Root { path: builder.http_mut().template(&path)?, base, alias })
}

fn disable_symlinks(builder: &mut Builder, statement: &Statement) -> Result<DisableSymlinks, Diagnostic> {
    let (mut refused, mut from) = (None, None);
    for word in &statement.args {
        match &**word.text {
            b"off" => refused = Some(None),
            b"on" => refused = Some(Some(RefusedLinks::All)),
            b"if_not_owner" => refused = Some(Some(RefusedLinks::Foreign)),
            text => match text.strip_prefix(b"from=") {
                Some(part) => from = Some(builder.http_mut().template(&Word { text: part.into(), ..word.clone() })?),
                None => return Err(Diagnostic::emerg(format!("invalid parameter \"{}\"", word.text)).at(word.span)),
            },
        }
    }
    let Some(refused) = refused else {
        let must = "must have \"off\", \"on\" or \"if_not_owner\" parameter";
        return Err(statement.error(format!("\"{}\" {must}", statement.name.text)));
    };
    match (&statement.args[..], refused, &from) {
        ([first, second], _, None) => {
            Err(statement.error(format!("duplicate parameters \"{} {}\"", first.text, second.text)))
        }
        (_, None, Some(_)) => Err(statement.error("\"from=\" cannot be used with \"off\" parameter")),
        _ => Ok(DisableSymlinks { refused, from }),
    }
}

fn open_file_cache(statement: &Statement) -> Result<OpenFileCache, Diagnostic> {
    let mut entries_max = None;
    let mut inactive = Duration::from_secs(60);
    let mut is_off = false;
    for word in &statement.args {
        let invalid = || {
            let message = format!("invalid \"open_file_cache\" parameter \"{}\"", word.text);
            Diagnostic::emerg(message).at(word.span).hint("off, or max=N and perhaps inactive=TIME")
        };
        if let Some(number) = word.text.strip_prefix(b"max=") {
            entries_max = Some(units::parse_number(number).filter(|&number| number > 0).ok_or_else(invalid)?);
        } else if let Some(time) = word.text.strip_prefix(b"inactive=") {
            inactive = units::parse_time_seconds(time).ok_or_else(invalid)?;
        } else if word.text == "off" {
            is_off = true;
        } else {
            return Err(invalid());
        }
    }
    if is_off {
        return Ok(OpenFileCache::Off);
    }
    let entries_max =
        entries_max.ok_or_else(|| statement.error("\"open_file_cache\" must have the \"max\" parameter"))?;
    Ok(OpenFileCache::Store(Store::new(entries_max, inactive)))
}

fn internal(core: &mut CoreSettings, _: &mut Builder, statement: &Statement) -> Result<(), Diagnostic> {
    if core.internal.is_set() {
        return Err(statement.directive_error("is duplicate"));
    }
    core.internal.set(true, Some(statement.span));
    Ok(())
}

/// `status_zone ZONE` of a server
fn server_zone(builder: &mut Builder, statement: &Statement) -> Result<(), Diagnostic> {
    let zone = builder.figures(figures::HTTP_SERVERS, &statement.args[0].text);
    if builder::set_server_zone(builder, zone) { Ok(()) } else { Err(statement.directive_error("is duplicate")) }
}

/// `status_zone ZONE | off` of a location
fn location_zone(builder: &mut Builder, statement: &Statement) -> Result<Option<Arc<Traffic>>, Diagnostic> {
    let name = &statement.args[0].text;
    Ok((name != "off").then(|| builder.figures(figures::HTTP_LOCATIONS, name)))
}

/// `slow_request_log off | TIME [LEVEL]`
fn slow_request_log(_: &mut Builder, statement: &Statement) -> Result<Option<SlowRequestLog>, Diagnostic> {
    if statement.args[0].text == "off" {
        return match statement.args.get(1) {
            None => Ok(None),
            Some(word) => Err(statement.error(format!("invalid parameter \"{}\"", word.text)).at(word.span)),
        };
    }
    let time = values::time_ms(statement)?;
    let level = statement.args.get(1).map_or(Ok(Level::Warn), log_level)?;
    Ok(Some(SlowRequestLog { time, level }))
}

/// `types { TYPE EXTENSION ...; }`; several blocks of one level add up.
fn types(core: &mut CoreSettings, builder: &mut Builder, statement: &Statement) -> Result<(), Diagnostic> {
    let mut types = match core.types.get_opt() {
        Some(earlier) => earlier.0.clone(),
        None => Default::default(),
    };
    for entry in statement.body() {
        if let Some(error) = &entry.broken {
            return Err((**error).clone());
        }
        if entry.block.is_some() {
            return Err(entry.error("unexpected \"{\"").hint("types are written TYPE EXTENSION ...;"));
        }
        for extension in &entry.args {
            let key = extension.text.to_ascii_lowercase().into_boxed_slice();
            let earlier = types.insert(key, entry.name.text.as_slice().into());
            if let Some(earlier) = earlier {
                let message = format!(
                    "duplicate extension \"{}\", content type: \"{}\", previous content type: \"{}\"",
                    extension.text,
                    entry.name.text,
                    earlier.as_bstr()
                );
                builder.note([Diagnostic::warn(message).at(extension.span)]);
            }
        }
    }
    core.types.set(Arc::new(Types(types)), Some(statement.span));
    Ok(())
}

fn default_types() -> Types {
    let rows: [(&[u8], &[u8]); 3] = [(b"html", b"text/html"), (b"gif", b"image/gif"), (b"jpg", b"image/jpeg")];
    Types(rows.into_iter().map(|(extension, media_type)| (extension.into(), media_type.into())).collect())
}

/// `early_hints STRING ...`; several of one level add up.
fn early_hints(core: &mut CoreSettings, builder: &mut Builder, statement: &Statement) -> Result<(), Diagnostic> {
    let mut texts = core.early_hints.take().unwrap_or_default();
    for word in &statement.args {
        texts.push(builder.http_mut().template(word)?);
    }
    core.early_hints.set(texts, Some(statement.span));
    Ok(())
}

/// `post_action URI|@NAME`
fn post_action(statement: &Statement) -> Result<PostAction, Diagnostic> {
    let text = &statement.args[0].text;
    Ok(match text.strip_prefix(b"@") {
        // Whatever is no path is a location's name, also without its @. (In nginx nothing is found then.)
        None if !text.starts_with(b"/") => PostAction::Named(text.as_slice().into()),
        None => PostAction::Path(text.as_slice().into()),
        Some(name) => PostAction::Named(name.into()),
    })
}

/// `error_page CODE ... [=[RESPONSE]] URI`
fn error_page(core: &mut CoreSettings, builder: &mut Builder, statement: &Statement) -> Result<(), Diagnostic> {
    let (target, rest) = statement.args.split_last().expect("two arguments at least");
    let (answer, codes) = match rest.split_last() {
        Some((word, codes)) if word.text.starts_with(b"=") => (replacement(word)?, codes),
        _ => (ErrorPageStatus::Keep, rest),
    };
    if codes.is_empty() {
        let word = &rest[0];
        let error = Diagnostic::emerg(format!("invalid value \"{}\"", word.text)).at(word.span);
        return Err(error.hint("at least one status must stand before the response"));
    }
    let target: Template = builder.http_mut().template(target)?;
    let mut pages = core.error_page.take().unwrap_or_default();
    for word in codes {
        let status = status_of(word)?;
        pages.push(ErrorPage { status, answer, target: target.clone() });
    }
    core.error_page.set(pages, Some(statement.span));
    Ok(())
}

fn replacement(word: &Word) -> Result<ErrorPageStatus, Diagnostic> {
    let text = &word.text[1..];
    if text.is_empty() {
        return Ok(ErrorPageStatus::OfTarget);
    }
    let status = units::parse_number(text).and_then(|number| u16::try_from(number).ok());
    status
        .map(ErrorPageStatus::Replace)
        .ok_or_else(|| Diagnostic::emerg(format!("invalid value \"{}\"", word.text)).at(word.span))
}

fn status_of(word: &Word) -> Result<u16, Diagnostic> {
    let number = units::parse_number(&word.text)
        .ok_or_else(|| Diagnostic::emerg(format!("invalid value \"{}\"", word.text)).at(word.span))?;
    match u16::try_from(number) {
        Ok(499) => Err(Diagnostic::emerg(format!("invalid value \"{}\"", word.text)).at(word.span)),
        Ok(status @ 300..=599) => Ok(status),
        _ => {
            let message = format!("value \"{}\" must be between 300 and 599", word.text);
            Err(Diagnostic::emerg(message).at(word.span))
        }
    }
}
