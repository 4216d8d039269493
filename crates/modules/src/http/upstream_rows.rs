//! Directives that all proxying modules have: `proxy_read_timeout`, `fastcgi_read_timeout` and so on. One macro makes
//! the rows, one function completes the settings.
//! (<https://nginx.org/en/docs/http/ngx_http_proxy_module.html>)

use std::sync::Arc;

use gale_config::{Body, Contexts, Diagnostic, Setting, Statement, Store, Takes, values};
use gale_engine::configuration::Builder;
use gale_engine::module::Directive;
use gale_engine::virtual_servers::TlsClientDraft;
use gale_http::configuration::builder::InHttp;
use gale_http::request::Request;
use gale_http::upstream::settings::{Ignored, RetryOn, UpstreamSettings};
use gale_spool::TempPath;
use gale_upstream::Bind;

pub(crate) use crate::http::cache_rows::conditions;
pub(crate) use crate::http::core::{send_lowat, size_template, temp_path};

/// Makes the rows of a module whose settings have an [`UpstreamSettings`] called `upstream`, for any protocol to
/// servers, with further rows behind them.
macro_rules! common_upstream_rows {
    ($conf:ty, $prefix:literal, [$($own:expr),* $(,)?]) => {
        &[
            $crate::http::upstream_rows::row!($conf, $prefix, "_bind", gale_config::Takes::Between(1, 2), "off",
                "Sets the local address of connections to servers.", with bind, bind),
            $crate::http::upstream_rows::row!($conf, $prefix, "_bind_dynamic", gale_config::Takes::Flag, "off",
                "No effect: the local address is always resolved when a connection is opened.",
                values flag, bind_dynamic),
            $crate::http::upstream_rows::row!($conf, $prefix, "_allow_upstream", gale_config::Takes::AtLeast(1), "",
                "Allows access to the chosen server only if all values are non-empty and not 0.",
                many_with conditions, allow_upstream),
            $crate::http::upstream_rows::row!($conf, $prefix, "_socket_keepalive", gale_config::Takes::Flag, "off",
                "Enables or disables TCP keepalive (SO_KEEPALIVE) on connections to servers.",
                values flag, socket_keepalive),
            $crate::http::upstream_rows::row!($conf, $prefix, "_socket_rcvbuf", gale_config::Takes::Exactly(1), "0",
                "Sets the receive buffer size (SO_RCVBUF) of connections to servers.", values size, socket_rcvbuf),
            $crate::http::upstream_rows::row!($conf, $prefix, "_socket_sndbuf", gale_config::Takes::Exactly(1), "0",
                "Sets the send buffer size (SO_SNDBUF) of connections to servers.", values size, socket_sndbuf),
            $crate::http::upstream_rows::row!($conf, $prefix, "_connect_timeout", gale_config::Takes::Exactly(1), "60s",
                "Sets the timeout for establishing a connection with a server.", values time_ms, connect_timeout),
            $crate::http::upstream_rows::row!($conf, $prefix, "_send_timeout", gale_config::Takes::Exactly(1), "60s",
                "Sets the timeout between two successive writes to the server.", values time_ms, send_timeout),
            $crate::http::upstream_rows::row!($conf, $prefix, "_read_timeout", gale_config::Takes::Exactly(1), "60s",
                "Sets the timeout between two successive reads from the server.", values time_ms, read_timeout),
            $crate::http::upstream_rows::row!($conf, $prefix, "_request_timeout", gale_config::Takes::Exactly(1), "0",
                "Limits the time from the first connection attempt to the end of the response; 0 disables the limit.",
                values time_ms, request_timeout),
            $crate::http::upstream_rows::row!($conf, $prefix, "_next_upstream", gale_config::Takes::AtLeast(1),
                "error timeout", "Sets the failures after which the next server of the group is tried.",
                updated next_upstream, next_upstream),
            $crate::http::upstream_rows::row!($conf, $prefix, "_next_upstream_tries", gale_config::Takes::Exactly(1),
                "0", "Limits the number of servers that are tried; 0 disables the limit.",
                values number, next_upstream_tries),
            $crate::http::upstream_rows::row!($conf, $prefix, "_next_upstream_timeout", gale_config::Takes::Exactly(1),
                "0", "Limits the time during which further servers are tried; 0 disables the limit.",
                values time_ms, next_upstream_timeout),
            $crate::http::upstream_rows::row!($conf, $prefix, "_buffer_size", gale_config::Takes::Exactly(1), "4k",
                "Sets the size of the buffer for the response header.", values size, buffer_size),
            $crate::http::upstream_rows::row!($conf, $prefix, "_intercept_errors", gale_config::Takes::Flag, "off",
                "Enables or disables error_page for responses of servers with codes of 300 and above.",
                values flag, intercept_errors),
            $crate::http::upstream_rows::row!($conf, $prefix, "_hide_header", gale_config::Takes::Exactly(1), "",
                "Hides a response header field of the server from the client.", many string, hide_header),
            $crate::http::upstream_rows::row!($conf, $prefix, "_pass_header", gale_config::Takes::Exactly(1), "",
                "Passes an otherwise hidden response header field to the client.", many string, pass_header),
            $crate::http::upstream_rows::row!($conf, $prefix, "_ignore_headers", gale_config::Takes::AtLeast(1), "",
                "Disables processing of certain response header fields of the server.",
                many_with ignore_headers, ignore_headers),
            $($own,)*
        ]
    };
}

/// Makes these rows, and those of a module that may store bodies.
macro_rules! upstream_rows {
    ($conf:ty, $prefix:literal, $temp:literal, [$($own:expr),* $(,)?]) => {
        $crate::http::upstream_rows::common_upstream_rows!($conf, $prefix, [
            $crate::http::upstream_rows::row!($conf, $prefix, "_buffers", gale_config::Takes::Exactly(2), "8 4k",
                "Sets the number and size of the buffers that hold a response in memory.", values buffers, buffers),
            $crate::http::upstream_rows::row!($conf, $prefix, "_busy_buffers_size", gale_config::Takes::Exactly(1), "",
                "No effect: responses being sent to the client have limits of their own. The value is checked.",
                values size, busy_buffers_size),
            $crate::http::upstream_rows::row!($conf, $prefix, "_buffering", gale_config::Takes::Flag, "on",
                "Enables or disables buffering of responses from servers.", values flag, buffering),
            $crate::http::upstream_rows::row!($conf, $prefix, "_request_buffering", gale_config::Takes::Flag, "on",
                "Enables or disables reading the whole request body before the request is passed to a server.",
                values flag, request_buffering),
            $crate::http::upstream_rows::row!($conf, $prefix, "_request_dynamic", gale_config::Takes::Flag, "off",
                "Enables or disables creating a separate request for each server that is tried.",
                values flag, request_dynamic),
            $crate::http::upstream_rows::row!($conf, $prefix, "_max_temp_file_size", gale_config::Takes::Exactly(1),
                "1024m", "Sets the maximum size of the temporary file of a response; 0 disables temporary files.",
                values size, max_temp_file_size),
            $crate::http::upstream_rows::row!($conf, $prefix, "_temp_file_write_size", gale_config::Takes::Exactly(1),
                "", "No effect: writes to temporary files have a size of their own. The value is checked.",
                values size, temp_file_write_size),
            $crate::http::upstream_rows::row!($conf, $prefix, "_temp_path", gale_config::Takes::Between(1, 4), "",
                concat!("Sets the directory for temporary files of responses; ", $temp, " by default."),
                with temp_path, temp_path),
            $crate::http::upstream_rows::row!($conf, $prefix, "_ignore_client_abort", gale_config::Takes::Flag, "off",
                "Enables or disables finishing a request whose client has closed the connection.",
                values flag, ignore_client_abort),
            $crate::http::upstream_rows::row!($conf, $prefix, "_force_ranges", gale_config::Takes::Flag, "off",
                "Enables or disables byte ranges of responses without Accept-Ranges.",
                values flag, force_ranges),
            $crate::http::upstream_rows::row!($conf, $prefix, "_limit_rate", gale_config::Takes::Exactly(1), "0",
                "Limits the rate of reading a response from the server in bytes per second; 0 disables the limit.",
                with size_template, limit_rate),
            $crate::http::upstream_rows::row!($conf, $prefix, "_pass_request_headers", gale_config::Takes::Flag, "on",
                "Enables or disables passing the request header fields to the server.",
                values flag, pass_request_headers),
            $crate::http::upstream_rows::row!($conf, $prefix, "_pass_request_body", gale_config::Takes::Flag, "on",
                "Enables or disables passing the request body to the server.", values flag, pass_request_body),
            $($own,)*
        ])
    };
}

macro_rules! row {
    (@ $prefix:literal, $name:literal, $takes:expr, $default:literal, $about:expr, $store:expr) => {
        gale_engine::module::Directive {
            name: concat!($prefix, $name),
            contexts: gale_config::Contexts::ANYWHERE,
            takes: $takes,
            body: gale_config::Body::None,
            default: $default,
            about: $about,
            store: $store,
        }
    };
    ($conf:ty, $prefix:literal, $name:literal, $takes:expr, $default:literal, $about:expr,
     values $parse:ident, $field:ident) => {
        $crate::http::upstream_rows::row!(@ $prefix, $name, $takes, $default, $about, &gale_config::One {
            parse: gale_config::values::$parse, slot: gale_config::slot!($conf, upstream.$field) })
    };
    ($conf:ty, $prefix:literal, $name:literal, $takes:expr, $default:literal, $about:expr,
     with $parse:ident, $field:ident) => {
        $crate::http::upstream_rows::row!(@ $prefix, $name, $takes, $default, $about, &gale_config::OneWith {
            parse: $crate::http::upstream_rows::$parse, slot: gale_config::slot!($conf, upstream.$field) })
    };
    ($conf:ty, $prefix:literal, $name:literal, $takes:expr, $default:literal, $about:expr,
     updated $parse:ident, $field:ident) => {
        $crate::http::upstream_rows::row!(@ $prefix, $name, $takes, $default, $about, &gale_config::Updated {
            parse: $crate::http::upstream_rows::$parse, slot: gale_config::slot!($conf, upstream.$field) })
    };
    ($conf:ty, $prefix:literal, $name:literal, $takes:expr, $default:literal, $about:expr,
     many_with $parse:ident, $field:ident) => {
        $crate::http::upstream_rows::row!(@ $prefix, $name, $takes, $default, $about, &gale_config::ManyWith {
            parse: $crate::http::upstream_rows::$parse, slot: gale_config::slot!($conf, upstream.$field) })
    };
    ($conf:ty, $prefix:literal, $name:literal, $takes:expr, $default:literal, $about:expr,
     many $parse:ident, $field:ident) => {
        $crate::http::upstream_rows::row!(@ $prefix, $name, $takes, $default, $about, &gale_config::Many {
            parse: gale_config::values::$parse, slot: gale_config::slot!($conf, upstream.$field) })
    };
}

/// Makes the rows of a module that may use TLS to servers: those of [`upstream_rows`] and `…_ssl_…`.
macro_rules! upstream_ssl_rows {
    ($conf:ty, $prefix:literal, $temp:literal, [$($own:expr),* $(,)?]) => {{
        use $crate::http::cache_rows::upstream_cache_rows;
        $crate::shared::tls_client::tls_client_rows!(
            upstream_cache_rows($conf, $prefix, $temp,), gale_http::request::Request, $conf, [upstream .], $prefix,
            gale_config::Contexts::ANYWHERE, [$($own),*]
        )
    }};
}

pub(crate) use crate::shared::tls_client::template;
pub(crate) use {common_upstream_rows, row, upstream_rows, upstream_ssl_rows};

/// Returns a row of a module's own, for every scope.
pub(crate) const fn own_row(
    name: &'static str,
    takes: Takes,
    default: &'static str,
    about: &'static str,
    store: &'static dyn Store<Builder>,
) -> Directive {
    Directive { name, contexts: Contexts::ANYWHERE, takes, body: Body::None, default, about, store }
}

/// Completes the settings of a scope whose rows have been inherited and set. `directory` is the name of the default
/// directory for temporary files, needed if the scope passes requests on; `hidden` are the fields that are not passed
/// to clients by default.
pub(crate) fn complete(
    settings: &mut UpstreamSettings,
    builder: &mut Builder,
    passes_requests: bool,
    prefix: &str,
    directory: &str,
    hidden: &[&str],
) -> Result<(), Diagnostic> {
    if !settings.temp_path.is_set() {
        let path = builder.default_temp_path(directory);
        settings.temp_path.set(TempPath { path: path.into(), levels: [1, 2].into_iter().collect() }, None);
    }
    if passes_requests && *settings.max_temp_file_size.get() > 0 {
        builder.http_mut().temp_paths.push(settings.temp_path.clone());
    }
    settings.complete(prefix, hidden)
}

/// Loads the files for TLS to servers, for a scope that may use it.
pub(crate) fn prepare_tls(
    settings: &mut UpstreamSettings,
    builder: &mut Builder,
    prefix: &'static str,
) -> Result<(), Diagnostic> {
    let client = Arc::default();
    settings.tls_certificate = match (settings.tls.certificate.get_opt(), settings.tls.key.get_opt()) {
        (Some(certificate), Some(key)) if settings.tls.names_certificate() => {
            let pair = (builder.http_mut().template(certificate)?, builder.http_mut().template(key)?);
            let directory = builder.configuration_directory.clone();
            builder.reach.reads_certificate(&directory, pair.0.known_path(), "ssl_certificate");
            builder.reach.reads_certificate(&directory, pair.1.known_path(), "ssl_certificate_key");
            Some(pair)
        }
        _ => None,
    };
    settings.tls_client = Some(Arc::clone(&client));
    builder.http_mut().tls_clients.push(TlsClientDraft { settings: settings.tls.clone(), prefix, client });
    Ok(())
}

/// Sets a value that has no directive in a module.
pub(crate) fn fix<T>(setting: &mut Setting<T>, value: T) {
    if !setting.is_set() {
        setting.set(value, None);
    }
}

pub(crate) fn bind(builder: &mut Builder, statement: &Statement) -> Result<Option<Bind<Request>>, Diagnostic> {
    Bind::parse(builder, statement)
}

pub(crate) fn next_upstream(
    builder: &mut Builder,
    statement: &Statement,
    earlier: Option<&RetryOn>,
) -> Result<RetryOn, Diagnostic> {
    // As in nginx, other protocols do not have these conditions.
    let is_of_proxy = |text: &str| matches!(text, "http_502" | "http_504");
    let is_proxy = [&b"proxy_"[..], b"grpc_"].iter().any(|prefix| statement.name.text.starts_with(prefix));
    let words = RetryOn::WORDS.iter().filter(|(text, _)| is_proxy || !is_of_proxy(text));
    retry_on(builder, statement, earlier, &words.copied().collect::<Vec<_>>())
}

/// Adds the conditions of these words, given with their bits, to those of earlier statements of the block.
pub(crate) fn retry_on(
    builder: &mut Builder,
    statement: &Statement,
    earlier: Option<&RetryOn>,
    words: &[(&str, u32)],
) -> Result<RetryOn, Diagnostic> {
    let earlier = earlier.map(|earlier| earlier.bits());
    values::bitmask(statement, words, earlier.as_ref(), &mut builder.diagnostics).map(|bits| {
        let retry_on = RetryOn::of(bits);
        // As in nginx, `off` cancels all others.
        if retry_on.has(RetryOn::OFF) { RetryOn::OFF } else { retry_on }
    })
}

/// Parses `memcached_next_upstream`, which has conditions of its own.
pub(crate) fn memcached_next_upstream(
    builder: &mut Builder,
    statement: &Statement,
    earlier: Option<&RetryOn>,
) -> Result<RetryOn, Diagnostic> {
    let word = |&(name, bit): &(&'static str, u32)| match name {
        "error" | "timeout" | "denied" | "off" => Some((name, bit)),
        "invalid_header" => Some(("invalid_response", bit)),
        "http_404" => Some(("not_found", bit)),
        _ => None,
    };
    retry_on(builder, statement, earlier, &RetryOn::WORDS.iter().filter_map(word).collect::<Vec<_>>())
}

/// Parses `tunnel_next_upstream`: a server that is only connected to has no invalid responses.
pub(crate) fn tunnel_next_upstream(
    builder: &mut Builder,
    statement: &Statement,
    earlier: Option<&RetryOn>,
) -> Result<RetryOn, Diagnostic> {
    let words = RetryOn::WORDS.iter().filter(|(name, _)| matches!(*name, "error" | "timeout" | "denied" | "off"));
    retry_on(builder, statement, earlier, &words.copied().collect::<Vec<_>>())
}

pub(crate) fn ignore_headers(builder: &mut Builder, statement: &Statement) -> Result<Ignored, Diagnostic> {
    values::bitmask(statement, Ignored::WORDS, None, &mut builder.diagnostics).map(Ignored::of)
}
