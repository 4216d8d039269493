//! http core: servers, locations, and the basic settings of requests and connections.
//!   main:
//!     http
//!   http:
//!     server
//!   server:
//!     listen, server_name
//!   server, location:
//!     location
//!   location:
//!     alias, internal, limit_except
//!   location, if in location:
//!     status_zone
//!   http, server:
//!     client_header_buffer_size, client_header_timeout, ignore_invalid_headers, large_client_header_buffers,
//!     max_headers, merge_slashes, underscores_in_headers
//!   http, server, location:
//!     absolute_redirect, aio, auth_delay, chunked_transfer_encoding, client_body_buffer_size,
//!     client_body_in_file_only, client_body_in_single_buffer, client_body_min_rate, client_body_temp_path,
//!     client_body_timeout, client_max_body_size, default_type, directio, directio_alignment, disable_symlinks,
//!     early_hints, error_log, etag, if_modified_since, keepalive_disable, keepalive_min_timeout, keepalive_requests,
//!     keepalive_time, keepalive_timeout, lingering_close, lingering_time, lingering_timeout, log_not_found,
//!     log_subrequest, max_ranges, msie_padding, msie_refresh, open_file_cache, open_file_cache_errors,
//!     open_file_cache_events, open_file_cache_min_uses, open_file_cache_valid, output_buffers, port_in_redirect,
//!     postpone_output, read_ahead, recursive_error_pages, reset_timedout_connection, resolver, resolver_timeout,
//!     satisfy, send_lowat, send_timeout, sendfile_max_chunk, server_name_in_redirect, server_tokens,
//!     slow_request_log, subrequest_output_buffer_size, tcp_nodelay, tcp_nopush, types
//!   http, server, location, if in location:
//!     error_page, limit_rate, limit_rate_after, post_action, root, sendfile
//! (<https://nginx.org/en/docs/http/ngx_http_core_module.html>)
//!
//! This file has the table of directives; `arguments.rs` parses their arguments.

mod arguments;

use std::sync::Arc;

use gale_config::{Body, Contexts, Custom, Diagnostic, ManyWith, One, OneWith, Takes, Updated, slot, values};
use gale_engine::configuration::{Builder, MainSettings, parse_resolver};
use gale_engine::module::{ConfType, Directive, Module};
use gale_http::configuration::builder;
use gale_http::configuration::settings::{CoreSettings, TempPath};
use gale_http::module::HttpPart;

use self::arguments::{
    aio, alias, alignment, body_in_file, count, default_types, directio, disable_symlinks, early_hints, error_page,
    header_buffers, if_modified_since, internal, keepalive_disable, keepalive_timeout, lingering_close, location_zone,
    min_rate, open_file_cache, post_action, root, satisfy, server_tokens, server_zone, size, size_or_none,
    slow_request_log, text, types,
};
pub(crate) use self::arguments::{send_lowat, size_template, temp_path};

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
        about: "Provides the context for HTTP server directives.",
        store: &Custom(|_: &mut (), builder, statement| builder::http_block(builder, statement)),
    },
    Directive {
        name: "server",
        contexts: Contexts::HTTP,
        takes: Takes::Exactly(0),
        body: Body::Block,
        default: "",
        about: "Sets configuration for a virtual server.",
        store: &Custom(|_: &mut (), builder, statement| builder::server_block(builder, statement)),
    },
    Directive {
        name: "location",
        contexts: Contexts::SERVER.or(Contexts::LOCATION),
        takes: Takes::Between(1, 2),
        body: Body::Block,
        default: "",
        about: "Sets configuration depending on the request URI.",
        store: &Custom(|_: &mut (), builder, statement| builder::location_block(builder, statement)),
    },
    Directive {
        name: "listen",
        contexts: Contexts::SERVER,
        takes: Takes::AtLeast(1),
        body: Body::None,
        default: "*:80 | *:8000",
        about: "Sets the address and port, or the UNIX-domain socket, on which the server accepts requests. Default: \
                port 80 for root, otherwise 8000.",
        store: &Custom(|_: &mut (), builder, statement| builder::listen(builder, statement)),
    },
    Directive {
        name: "server_name",
        contexts: Contexts::SERVER,
        takes: Takes::AtLeast(1),
        body: Body::None,
        default: "",
        about: "Sets the names of a virtual server.",
        store: &Custom(|_: &mut (), builder, statement| builder::server_name(builder, statement)),
    },
    Directive {
        name: "client_header_buffer_size",
        contexts: Contexts::HTTP.or(Contexts::SERVER),
        takes: Takes::Exactly(1),
        body: Body::None,
        default: "1k",
        about: "Sets the buffer size for reading the request header.",
        store: &One { parse: size, slot: slot!(CoreSettings, client_header_buffer_size) },
    },
    Directive {
        name: "large_client_header_buffers",
        contexts: Contexts::HTTP.or(Contexts::SERVER),
        takes: Takes::Exactly(2),
        body: Body::None,
        default: "4 8k",
        about: "Sets the maximum number and size of buffers for a large request header; each line must fit in one \
                buffer.",
        store: &One { parse: header_buffers, slot: slot!(CoreSettings, large_client_header_buffers) },
    },
    Directive {
        name: "client_header_timeout",
        contexts: Contexts::HTTP.or(Contexts::SERVER),
        takes: Takes::Exactly(1),
        body: Body::None,
        default: "60s",
        about: "Sets the timeout for reading the request header.",
        store: &One { parse: values::time_ms, slot: slot!(CoreSettings, client_header_timeout) },
    },
    Directive {
        name: "ignore_invalid_headers",
        contexts: Contexts::HTTP.or(Contexts::SERVER),
        takes: Takes::Flag,
        body: Body::None,
        default: "on",
        about: "Enables or disables ignoring request header fields with invalid names; off refuses such requests.",
        store: &One { parse: values::flag, slot: slot!(CoreSettings, ignore_invalid_headers) },
    },
    Directive {
        name: "underscores_in_headers",
        contexts: Contexts::HTTP.or(Contexts::SERVER),
        takes: Takes::Flag,
        body: Body::None,
        default: "off",
        about: "Enables or disables underscores in names of request header fields.",
        store: &One { parse: values::flag, slot: slot!(CoreSettings, underscores_in_headers) },
    },
    Directive {
        name: "merge_slashes",
        contexts: Contexts::HTTP.or(Contexts::SERVER),
        takes: Takes::Flag,
        body: Body::None,
        default: "on",
        about: "Enables or disables merging of adjacent slashes in a URI into one.",
        store: &One { parse: values::flag, slot: slot!(CoreSettings, merge_slashes) },
    },
    Directive {
        name: "max_headers",
        contexts: Contexts::HTTP.or(Contexts::SERVER),
        takes: Takes::Exactly(1),
        body: Body::None,
        default: "1000",
        about: "Sets the maximum number of request header fields.",
        store: &One { parse: count, slot: slot!(CoreSettings, max_headers) },
    },
    Directive {
        name: "client_max_body_size",
        contexts: Contexts::ANYWHERE,
        takes: Takes::Exactly(1),
        body: Body::None,
        default: "1m",
        about: "Sets the maximum size of the request body; 0 disables the check.",
        store: &One { parse: values::offset, slot: slot!(CoreSettings, client_max_body_size) },
    },
    Directive {
        name: "client_body_buffer_size",
        contexts: Contexts::ANYWHERE,
        takes: Takes::Exactly(1),
        body: Body::None,
        default: "16k",
        about: "Sets the buffer size for the request body; the part beyond it is written to a temporary file.",
        store: &One { parse: size_or_none, slot: slot!(CoreSettings, client_body_buffer_size) },
    },
    Directive {
        name: "client_body_timeout",
        contexts: Contexts::ANYWHERE,
        takes: Takes::Exactly(1),
        body: Body::None,
        default: "60s",
        about: "Sets the timeout between two successive reads of the request body.",
        store: &One { parse: values::time_ms, slot: slot!(CoreSettings, client_body_timeout) },
    },
    Directive {
        name: "client_body_min_rate",
        contexts: Contexts::ANYWHERE,
        takes: Takes::Between(1, 2),
        body: Body::None,
        default: "0",
        about: "Sets the minimum average rate of a request body in bytes per second, enforced after 10s or after=TIME; \
                0 disables it.",
        store: &One { parse: min_rate, slot: slot!(CoreSettings, client_body_min_rate) },
    },
    Directive {
        name: "client_body_temp_path",
        contexts: Contexts::ANYWHERE,
        takes: Takes::Between(1, 4),
        body: Body::None,
        default: "",
        about: "Sets the directory for temporary files of request bodies; /var/lib/gale/body (or /var/lib/nginx/body) \
                by default.",
        store: &OneWith { parse: temp_path, slot: slot!(CoreSettings, client_body_temp_path) },
    },
    Directive {
        name: "client_body_in_file_only",
        contexts: Contexts::ANYWHERE,
        takes: Takes::Exactly(1),
        body: Body::None,
        default: "off",
        about: "Enables or disables saving whole request bodies to files; clean removes the files after the requests.",
        store: &One { parse: body_in_file, slot: slot!(CoreSettings, client_body_in_file_only) },
    },
    Directive {
        name: "client_body_in_single_buffer",
        contexts: Contexts::ANYWHERE,
        takes: Takes::Flag,
        body: Body::None,
        default: "off",
        about: "Enables or disables keeping the request body in a single buffer.",
        store: &One { parse: values::flag, slot: slot!(CoreSettings, client_body_in_single_buffer) },
    },
    Directive {
        name: "send_timeout",
        contexts: Contexts::ANYWHERE,
        takes: Takes::Exactly(1),
        body: Body::None,
        default: "60s",
        about: "Sets the timeout between two successive writes to the client.",
        store: &One { parse: values::time_ms, slot: slot!(CoreSettings, send_timeout) },
    },
    Directive {
        name: "keepalive_timeout",
        contexts: Contexts::ANYWHERE,
        takes: Takes::Between(1, 2),
        body: Body::None,
        default: "75s",
        about: "Sets how long an idle keep-alive connection stays open, and the value of the Keep-Alive response \
                header field.",
        store: &One { parse: keepalive_timeout, slot: slot!(CoreSettings, keepalive_timeout) },
    },
    Directive {
        name: "keepalive_disable",
        contexts: Contexts::ANYWHERE,
        takes: Takes::AtLeast(1),
        body: Body::None,
        default: "msie6",
        about: "Disables keep-alive connections with misbehaving browsers: none, msie6 or safari.",
        store: &Updated { parse: keepalive_disable, slot: slot!(CoreSettings, keepalive_disable) },
    },
    Directive {
        name: "keepalive_requests",
        contexts: Contexts::ANYWHERE,
        takes: Takes::Exactly(1),
        body: Body::None,
        default: "1000",
        about: "Sets the maximum number of requests served through one keep-alive connection.",
        store: &One { parse: values::number, slot: slot!(CoreSettings, keepalive_requests) },
    },
    Directive {
        name: "keepalive_time",
        contexts: Contexts::ANYWHERE,
        takes: Takes::Exactly(1),
        body: Body::None,
        default: "1h",
        about: "Limits the time during which requests are processed through one keep-alive connection.",
        store: &One { parse: values::time_ms, slot: slot!(CoreSettings, keepalive_time) },
    },
    Directive {
        name: "keepalive_min_timeout",
        contexts: Contexts::ANYWHERE,
        takes: Takes::Exactly(1),
        body: Body::None,
        default: "0",
        about: "Sets a timeout during which an idle keep-alive connection is not closed for reuse or on graceful \
                shutdown.",
        store: &One { parse: values::time_ms, slot: slot!(CoreSettings, keepalive_min_timeout) },
    },
    Directive {
        name: "limit_rate",
        contexts: Contexts::ANYWHERE.or(Contexts::IF_IN_LOCATION),
        takes: Takes::Exactly(1),
        body: Body::None,
        default: "0",
        about: "Limits the rate of response transmission in bytes per second; 0 disables the limit.",
        store: &OneWith { parse: size_template, slot: slot!(CoreSettings, limit_rate) },
    },
    Directive {
        name: "limit_rate_after",
        contexts: Contexts::ANYWHERE.or(Contexts::IF_IN_LOCATION),
        takes: Takes::Exactly(1),
        body: Body::None,
        default: "0",
        about: "Sets the initial amount of a response after which limit_rate applies.",
        store: &OneWith { parse: size_template, slot: slot!(CoreSettings, limit_rate_after) },
    },
    Directive {
        name: "lingering_close",
        contexts: Contexts::ANYWHERE,
        takes: Takes::Exactly(1),
        body: Body::None,
        default: "on",
        about: "Sets whether data that a client still sends is read before the connection is closed: off, on or \
                always.",
        store: &One { parse: lingering_close, slot: slot!(CoreSettings, lingering_close) },
    },
    Directive {
        name: "lingering_time",
        contexts: Contexts::ANYWHERE,
        takes: Takes::Exactly(1),
        body: Body::None,
        default: "30s",
        about: "Sets the maximum time during which a closing connection is read (lingering_close).",
        store: &One { parse: values::time_ms, slot: slot!(CoreSettings, lingering_time) },
    },
    Directive {
        name: "lingering_timeout",
        contexts: Contexts::ANYWHERE,
        takes: Takes::Exactly(1),
        body: Body::None,
        default: "5s",
        about: "Sets the maximum wait for more data on a closing connection (lingering_close).",
        store: &One { parse: values::time_ms, slot: slot!(CoreSettings, lingering_timeout) },
    },
    Directive {
        name: "reset_timedout_connection",
        contexts: Contexts::ANYWHERE,
        takes: Takes::Flag,
        body: Body::None,
        default: "off",
        about: "Enables or disables resetting timed-out connections instead of closing them.",
        store: &One { parse: values::flag, slot: slot!(CoreSettings, reset_timedout_connection) },
    },
    Directive {
        name: "tcp_nodelay",
        contexts: Contexts::ANYWHERE,
        takes: Takes::Flag,
        body: Body::None,
        default: "on",
        about: "Enables or disables the TCP_NODELAY option.",
        store: &One { parse: values::flag, slot: slot!(CoreSettings, tcp_nodelay) },
    },
    Directive {
        name: "tcp_nopush",
        contexts: Contexts::ANYWHERE,
        takes: Takes::Flag,
        body: Body::None,
        default: "off",
        about: "Enables or disables sending the response header and the file in full packets.",
        store: &One { parse: values::flag, slot: slot!(CoreSettings, tcp_nopush) },
    },
    Directive {
        name: "sendfile",
        contexts: Contexts::ANYWHERE.or(Contexts::IF_IN_LOCATION),
        takes: Takes::Flag,
        body: Body::None,
        default: "off",
        about: "Enables or disables the use of sendfile().",
        store: &One { parse: values::flag, slot: slot!(CoreSettings, sendfile) },
    },
    Directive {
        name: "sendfile_max_chunk",
        contexts: Contexts::ANYWHERE,
        takes: Takes::Exactly(1),
        body: Body::None,
        default: "2m",
        about: "Limits the amount of a file that is sent in one sendfile() call.",
        store: &One { parse: values::size, slot: slot!(CoreSettings, sendfile_max_chunk) },
    },
    Directive {
        name: "open_file_cache",
        contexts: Contexts::ANYWHERE,
        takes: Takes::Between(1, 2),
        body: Body::None,
        default: "",
        // nginx's default is "off", which means less here: small files in demand are cached without it.
        about: "Configures the cache of open files: max=N [inactive=TIME], or off. Default: only small files in demand \
                are cached.",
        store: &One { parse: open_file_cache, slot: slot!(CoreSettings, open_file_cache) },
    },
    Directive {
        name: "open_file_cache_valid",
        contexts: Contexts::ANYWHERE,
        takes: Takes::Exactly(1),
        body: Body::None,
        default: "60s",
        about: "Sets the time after which entries of open_file_cache are validated.",
        store: &One { parse: values::time_s, slot: slot!(CoreSettings, open_file_cache_valid) },
    },
    Directive {
        name: "open_file_cache_min_uses",
        contexts: Contexts::ANYWHERE,
        takes: Takes::Exactly(1),
        body: Body::None,
        default: "1",
        about: "Sets the minimum number of uses for a file to stay open in open_file_cache.",
        store: &One { parse: values::number, slot: slot!(CoreSettings, open_file_cache_min_uses) },
    },
    Directive {
        name: "open_file_cache_errors",
        contexts: Contexts::ANYWHERE,
        takes: Takes::Flag,
        body: Body::None,
        default: "off",
        about: "Enables or disables caching of file lookup errors in open_file_cache.",
        store: &One { parse: values::flag, slot: slot!(CoreSettings, open_file_cache_errors) },
    },
    Directive {
        name: "open_file_cache_events",
        contexts: Contexts::ANYWHERE,
        takes: Takes::Flag,
        body: Body::None,
        default: "off",
        about: "Enables or disables keeping entries that the kernel watches for changes valid beyond \
                open_file_cache_valid.",
        store: &One { parse: values::flag, slot: slot!(CoreSettings, open_file_cache_events) },
    },
    Directive {
        name: "aio",
        contexts: Contexts::ANYWHERE,
        takes: Takes::Exactly(1),
        body: Body::None,
        // nginx's default is "off": nginx cannot tell whether a file is in memory.
        default: "auto",
        about: "Sets how parts of files that are not in memory are read: auto, on, off, threads or threads=POOL.",
        store: &OneWith { parse: aio, slot: slot!(CoreSettings, aio) },
    },
    Directive {
        name: "directio",
        contexts: Contexts::ANYWHERE,
        takes: Takes::Exactly(1),
        body: Body::None,
        default: "off",
        about: "Sets the size from which files are read with O_DIRECT, bypassing the page cache.",
        store: &One { parse: directio, slot: slot!(CoreSettings, directio) },
    },
    Directive {
        name: "directio_alignment",
        contexts: Contexts::ANYWHERE,
        takes: Takes::Exactly(1),
        body: Body::None,
        default: "512",
        about: "Sets the alignment for directio; at least 4096 is used.",
        store: &One { parse: alignment, slot: slot!(CoreSettings, directio_alignment) },
    },
    Directive {
        name: "output_buffers",
        contexts: Contexts::ANYWHERE,
        takes: Takes::Exactly(2),
        body: Body::None,
        default: "2 32k",
        about: "Sets the number and size of the buffers for reading a file from disk.",
        store: &One { parse: header_buffers, slot: slot!(CoreSettings, output_buffers) },
    },
    Directive {
        name: "postpone_output",
        contexts: Contexts::ANYWHERE,
        takes: Takes::Exactly(1),
        body: Body::None,
        default: "1460",
        about: "Sets the amount of output that is gathered before it is sent.",
        store: &One { parse: values::size, slot: slot!(CoreSettings, postpone_output) },
    },
    Directive {
        name: "read_ahead",
        contexts: Contexts::ANYWHERE,
        takes: Takes::Exactly(1),
        body: Body::None,
        default: "0",
        about: "Sets whether the kernel is told that large files are read sequentially; 0 disables it.",
        store: &One { parse: values::size, slot: slot!(CoreSettings, read_ahead) },
    },
    Directive {
        name: "send_lowat",
        contexts: Contexts::ANYWHERE,
        takes: Takes::Exactly(1),
        body: Body::None,
        // nginx's default is "0"; here an explicit value leads to a warning.
        default: "",
        about: "No effect on Linux.",
        store: &OneWith { parse: send_lowat, slot: slot!(CoreSettings, send_lowat) },
    },
    Directive {
        name: "root",
        contexts: Contexts::ANYWHERE.or(Contexts::IF_IN_LOCATION),
        takes: Takes::Exactly(1),
        body: Body::None,
        default: "html",
        about: "Sets the root directory for requests.",
        store: &OneWith { parse: root, slot: slot!(CoreSettings, root) },
    },
    Directive {
        name: "alias",
        contexts: Contexts::LOCATION,
        takes: Takes::Exactly(1),
        body: Body::None,
        default: "",
        about: "Sets the directory that replaces the location's prefix.",
        store: &Custom(alias),
    },
    Directive {
        name: "disable_symlinks",
        contexts: Contexts::ANYWHERE,
        takes: Takes::Between(1, 2),
        body: Body::None,
        default: "off",
        about: "Sets which symbolic links in a path are refused: none (off), all (on), or those of another owner \
                (if_not_owner).",
        store: &OneWith { parse: disable_symlinks, slot: slot!(CoreSettings, disable_symlinks) },
    },
    Directive {
        name: "internal",
        contexts: Contexts::LOCATION,
        takes: Takes::Exactly(0),
        body: Body::None,
        default: "",
        about: "Restricts the location to internal requests; external requests get 404.",
        store: &Custom(internal),
    },
    Directive {
        name: "satisfy",
        contexts: Contexts::ANYWHERE,
        takes: Takes::Exactly(1),
        body: Body::None,
        default: "all",
        about: "Allows access if all (all) or at least one (any) of the access modules allow it.",
        store: &One { parse: satisfy, slot: slot!(CoreSettings, satisfy) },
    },
    Directive {
        name: "auth_delay",
        contexts: Contexts::ANYWHERE,
        takes: Takes::Exactly(1),
        body: Body::None,
        default: "0s",
        about: "Delays responses to unauthorized requests (401), which slows down password guessing.",
        store: &One { parse: values::time_ms, slot: slot!(CoreSettings, auth_delay) },
    },
    Directive {
        name: "limit_except",
        contexts: Contexts::LOCATION,
        takes: Takes::AtLeast(1),
        body: Body::Block,
        default: "",
        about: "Limits the allowed HTTP methods inside a location; the block applies to all other methods.",
        store: &Custom(|_: &mut (), builder, statement| builder::limit_except(builder, statement)),
    },
    Directive {
        name: "default_type",
        contexts: Contexts::ANYWHERE,
        takes: Takes::Exactly(1),
        body: Body::None,
        default: "text/plain",
        about: "Sets the MIME type of files with an unknown extension.",
        store: &One { parse: text, slot: slot!(CoreSettings, default_type) },
    },
    Directive {
        name: "types",
        contexts: Contexts::ANYWHERE,
        takes: Takes::Exactly(0),
        body: Body::Block,
        default: "",
        about: "Maps file name extensions to MIME types of responses.",
        store: &Custom(types),
    },
    Directive {
        name: "early_hints",
        contexts: Contexts::ANYWHERE,
        takes: Takes::AtLeast(1),
        body: Body::None,
        default: "",
        about: "Passes 103 (Early Hints) responses to the client if at least one value is non-empty and not 0.",
        store: &Custom(early_hints),
    },
    Directive {
        name: "error_page",
        contexts: Contexts::ANYWHERE.or(Contexts::IF_IN_LOCATION),
        takes: Takes::AtLeast(2),
        body: Body::None,
        default: "",
        about: "Defines the URI that is shown for the specified errors.",
        store: &Custom(error_page),
    },
    Directive {
        name: "recursive_error_pages",
        contexts: Contexts::ANYWHERE,
        takes: Takes::Flag,
        body: Body::None,
        default: "off",
        about: "Enables or disables several redirects by error_page for one request.",
        store: &One { parse: values::flag, slot: slot!(CoreSettings, recursive_error_pages) },
    },
    Directive {
        name: "post_action",
        contexts: Contexts::ANYWHERE.or(Contexts::IF_IN_LOCATION),
        takes: Takes::Exactly(1),
        body: Body::None,
        default: "",
        about: "Sets the URI or named location that is requested in the background after a request ends.",
        store: &One { parse: post_action, slot: slot!(CoreSettings, post_action) },
    },
    Directive {
        name: "msie_padding",
        contexts: Contexts::ANYWHERE,
        takes: Takes::Flag,
        body: Body::None,
        default: "on",
        about: "Enables or disables padding of error pages, so that MSIE and Chrome show them.",
        store: &One { parse: values::flag, slot: slot!(CoreSettings, msie_padding) },
    },
    Directive {
        name: "msie_refresh",
        contexts: Contexts::ANYWHERE,
        takes: Takes::Flag,
        body: Body::None,
        default: "off",
        about: "Enables or disables refreshes instead of redirects for MSIE.",
        store: &One { parse: values::flag, slot: slot!(CoreSettings, msie_refresh) },
    },
    Directive {
        name: "server_tokens",
        contexts: Contexts::ANYWHERE,
        takes: Takes::Exactly(1),
        body: Body::None,
        default: "on",
        about: "Sets the Server response header field: on, off, build, or any text.",
        store: &OneWith { parse: server_tokens, slot: slot!(CoreSettings, server_tokens) },
    },
    Directive {
        name: "etag",
        contexts: Contexts::ANYWHERE,
        takes: Takes::Flag,
        body: Body::None,
        default: "on",
        about: "Enables or disables the ETag response header field for static files.",
        store: &One { parse: values::flag, slot: slot!(CoreSettings, etag) },
    },
    Directive {
        name: "if_modified_since",
        contexts: Contexts::ANYWHERE,
        takes: Takes::Exactly(1),
        body: Body::None,
        default: "exact",
        about: "Sets how the modification time of a response is compared with If-Modified-Since: off, exact or before.",
        store: &One { parse: if_modified_since, slot: slot!(CoreSettings, if_modified_since) },
    },
    Directive {
        name: "max_ranges",
        contexts: Contexts::ANYWHERE,
        takes: Takes::Exactly(1),
        body: Body::None,
        default: "2147483647",
        about: "Limits the number of ranges in a request; with more the whole response is sent. 0 disables ranges.",
        store: &One { parse: values::number, slot: slot!(CoreSettings, max_ranges) },
    },
    Directive {
        name: "chunked_transfer_encoding",
        contexts: Contexts::ANYWHERE,
        takes: Takes::Flag,
        body: Body::None,
        default: "on",
        about: "Enables or disables chunked transfer encoding in HTTP/1.1.",
        store: &One { parse: values::flag, slot: slot!(CoreSettings, chunked_transfer_encoding) },
    },
    Directive {
        name: "absolute_redirect",
        contexts: Contexts::ANYWHERE,
        takes: Takes::Flag,
        body: Body::None,
        default: "on",
        about: "Enables or disables absolute redirects; off sends relative ones.",
        store: &One { parse: values::flag, slot: slot!(CoreSettings, absolute_redirect) },
    },
    Directive {
        name: "server_name_in_redirect",
        contexts: Contexts::ANYWHERE,
        takes: Takes::Flag,
        body: Body::None,
        default: "off",
        about: "Enables or disables the primary server name in absolute redirects, instead of the requested host.",
        store: &One { parse: values::flag, slot: slot!(CoreSettings, server_name_in_redirect) },
    },
    Directive {
        name: "port_in_redirect",
        contexts: Contexts::ANYWHERE,
        takes: Takes::Flag,
        body: Body::None,
        default: "on",
        about: "Enables or disables the port in absolute redirects.",
        store: &One { parse: values::flag, slot: slot!(CoreSettings, port_in_redirect) },
    },
    Directive {
        name: "resolver",
        contexts: Contexts::ANYWHERE,
        takes: Takes::AtLeast(1),
        body: Body::None,
        default: "",
        about: "Configures the name servers that resolve names of upstream servers: ADDRESS ... [valid=TIME] \
                [ipv4=on|off] [ipv6=on|off].",
        store: &OneWith {
            parse: |builder, statement| parse_resolver(builder, statement).map(Arc::new),
            slot: slot!(CoreSettings, resolver),
        },
    },
    Directive {
        name: "resolver_timeout",
        contexts: Contexts::ANYWHERE,
        takes: Takes::Exactly(1),
        body: Body::None,
        default: "30s",
        about: "Sets the timeout for name resolution; 0 disables it.",
        store: &One { parse: values::time_ms, slot: slot!(CoreSettings, resolver_timeout) },
    },
    Directive {
        name: "status_zone",
        contexts: Contexts::SERVER,
        takes: Takes::Exactly(1),
        body: Body::None,
        default: "",
        about: "Sets the zone that counts the requests of the server.",
        store: &Custom(|_: &mut (), builder, statement| server_zone(builder, statement)),
    },
    Directive {
        name: "status_zone",
        contexts: Contexts::LOCATION.or(Contexts::IF_IN_LOCATION),
        takes: Takes::Exactly(1),
        body: Body::None,
        default: "",
        about: "Sets the zone that counts the requests that end in this location; off disables it.",
        store: &OneWith { parse: location_zone, slot: slot!(CoreSettings, location_zone) },
    },
    Directive {
        name: "slow_request_log",
        contexts: Contexts::ANYWHERE,
        takes: Takes::Between(1, 2),
        body: Body::None,
        default: "off",
        about: "Logs requests that take longer than TIME, and where the time went, to the error log, at the given \
                level (warn by default).",
        store: &OneWith { parse: slow_request_log, slot: slot!(CoreSettings, slow_request_log) },
    },
    Directive {
        name: "log_subrequest",
        contexts: Contexts::ANYWHERE,
        takes: Takes::Flag,
        body: Body::None,
        default: "off",
        about: "Enables or disables logging of subrequests to the access log.",
        store: &One { parse: values::flag, slot: slot!(CoreSettings, log_subrequest) },
    },
    Directive {
        name: "subrequest_output_buffer_size",
        contexts: Contexts::ANYWHERE,
        takes: Takes::Exactly(1),
        body: Body::None,
        default: "4k",
        about: "Sets the maximum size of a subrequest's response body that is kept in memory.",
        store: &One { parse: size_or_none, slot: slot!(CoreSettings, subrequest_output_buffer_size) },
    },
    Directive {
        name: "log_not_found",
        contexts: Contexts::ANYWHERE,
        takes: Takes::Flag,
        body: Body::None,
        default: "on",
        about: "Enables or disables logging of errors about files that are not found.",
        store: &One { parse: values::flag, slot: slot!(CoreSettings, log_not_found) },
    },
    Directive {
        name: "error_log",
        contexts: Contexts::ANYWHERE,
        takes: Takes::AtLeast(1),
        body: Body::None,
        default: "",
        about: "Sets the destination, minimum level and format of the error log; may be repeated. Default: as in the \
                main context.",
        store: &ManyWith { parse: crate::core::error_log, slot: slot!(CoreSettings, error_log) },
    },
];

/// Sets the defaults of `types` and `error_log`, which are not texts.
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
