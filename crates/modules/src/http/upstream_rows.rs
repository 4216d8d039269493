//! The directives that every module has that passes requests on: `proxy_read_timeout`, `fastcgi_read_timeout` and so
//! on. One macro makes the rows, one function completes the settings.
//! (<https://nginx.org/en/docs/http/ngx_http_proxy_module.html>)

use std::sync::Arc;

use gale_config::{Body, Contexts, Diagnostic, Setting, Statement, Store, Takes, values};
use gale_engine::configuration::Builder;
use gale_engine::module::Directive;
use gale_engine::spool::TempPath;
use gale_engine::upstream::Bind;
use gale_engine::virtual_servers::TlsClientDraft;
use gale_http::configuration::builder::InHttp;
use gale_http::request::Request;
use gale_http::upstream::settings::{Ignored, RetryOn, UpstreamSettings};

pub(crate) use crate::http::cache_rows::conditions;
pub(crate) use crate::http::core::{send_lowat, size_template, temp_path};

/// The rows of a module whose settings have an [`UpstreamSettings`] called `upstream`, whatever it speaks with servers,
/// with further rows behind them.
macro_rules! common_upstream_rows {
    ($conf:ty, $prefix:literal, [$($own:expr),* $(,)?]) => {
        &[
            $crate::http::upstream_rows::row!($conf, $prefix, "_bind", gale_config::Takes::Between(1, 2), "off",
                "The address that connections to servers come from.", with bind, bind),
            $crate::http::upstream_rows::row!($conf, $prefix, "_bind_dynamic", gale_config::Takes::Flag, "off",
                "Checked; which address it is, is looked at whenever a server is connected to.",
                values flag, bind_dynamic),
            $crate::http::upstream_rows::row!($conf, $prefix, "_allow_upstream", gale_config::Takes::AtLeast(1), "",
                "Texts of which none may be empty or 0, or the server that was chosen is not connected to.",
                many_with conditions, allow_upstream),
            $crate::http::upstream_rows::row!($conf, $prefix, "_socket_keepalive", gale_config::Takes::Flag, "off",
                "Whether the kernel checks connections to servers that are silent (SO_KEEPALIVE).",
                values flag, socket_keepalive),
            $crate::http::upstream_rows::row!($conf, $prefix, "_socket_rcvbuf", gale_config::Takes::Exactly(1), "0",
                "The kernel's buffer for what servers send (SO_RCVBUF), in bytes.", values size, socket_rcvbuf),
            $crate::http::upstream_rows::row!($conf, $prefix, "_socket_sndbuf", gale_config::Takes::Exactly(1), "0",
                "The kernel's buffer for what is sent to servers (SO_SNDBUF), in bytes.", values size, socket_sndbuf),
            $crate::http::upstream_rows::row!($conf, $prefix, "_connect_timeout", gale_config::Takes::Exactly(1), "60s",
                "How long connecting to a server may take.", values time_ms, connect_timeout),
            $crate::http::upstream_rows::row!($conf, $prefix, "_send_timeout", gale_config::Takes::Exactly(1), "60s",
                "How long a server may take nothing of a request.", values time_ms, send_timeout),
            $crate::http::upstream_rows::row!($conf, $prefix, "_read_timeout", gale_config::Takes::Exactly(1), "60s",
                "How long a server may be silent.", values time_ms, read_timeout),
            $crate::http::upstream_rows::row!($conf, $prefix, "_request_timeout", gale_config::Takes::Exactly(1), "0",
                "How long it may take from the first server that is tried to the end of the response; 0 for ever.",
                values time_ms, request_timeout),
            $crate::http::upstream_rows::row!($conf, $prefix, "_next_upstream", gale_config::Takes::AtLeast(1),
                "error timeout", "What has the next server of a group tried.", updated next_upstream, next_upstream),
            $crate::http::upstream_rows::row!($conf, $prefix, "_next_upstream_tries", gale_config::Takes::Exactly(1),
                "0", "How many servers are tried; 0 for all.", values number, next_upstream_tries),
            $crate::http::upstream_rows::row!($conf, $prefix, "_next_upstream_timeout", gale_config::Takes::Exactly(1),
                "0", "For how long servers are tried; 0 for ever.", values time_ms, next_upstream_timeout),
            $crate::http::upstream_rows::row!($conf, $prefix, "_buffer_size", gale_config::Takes::Exactly(1), "4k",
                "How long the head of a response may be.", values size, buffer_size),
            $crate::http::upstream_rows::row!($conf, $prefix, "_intercept_errors", gale_config::Takes::Flag, "off",
                "Whether error_page is for the errors of servers, too.", values flag, intercept_errors),
            $crate::http::upstream_rows::row!($conf, $prefix, "_hide_header", gale_config::Takes::Exactly(1), "",
                "A field of responses that clients do not get.", many string, hide_header),
            $crate::http::upstream_rows::row!($conf, $prefix, "_pass_header", gale_config::Takes::Exactly(1), "",
                "A field of responses that clients get although they usually do not.", many string, pass_header),
            $crate::http::upstream_rows::row!($conf, $prefix, "_ignore_headers", gale_config::Takes::AtLeast(1), "",
                "Fields of responses that have no effect here.", many_with ignore_headers, ignore_headers),
            $($own,)*
        ]
    };
}

/// Those, and the rows of a module whose bodies are stored on their way.
macro_rules! upstream_rows {
    ($conf:ty, $prefix:literal, $temp:literal, [$($own:expr),* $(,)?]) => {
        $crate::http::upstream_rows::common_upstream_rows!($conf, $prefix, [
            $crate::http::upstream_rows::row!($conf, $prefix, "_buffers", gale_config::Takes::Exactly(2), "8 4k",
                "How much of a response may be ahead of its client in memory.", values buffers, buffers),
            $crate::http::upstream_rows::row!($conf, $prefix, "_busy_buffers_size", gale_config::Takes::Exactly(1), "",
                "Checked; what is on its way to the client has bounds of its own.", values size, busy_buffers_size),
            $crate::http::upstream_rows::row!($conf, $prefix, "_buffering", gale_config::Takes::Flag, "on",
                "Whether responses are read as fast as they come.", values flag, buffering),
            $crate::http::upstream_rows::row!($conf, $prefix, "_request_buffering", gale_config::Takes::Flag, "on",
                "Whether a request's body is read to its end before a server is asked.",
                values flag, request_buffering),
            $crate::http::upstream_rows::row!($conf, $prefix, "_request_dynamic", gale_config::Takes::Flag, "off",
                "Whether the request is written anew for each server that is tried.", values flag, request_dynamic),
            $crate::http::upstream_rows::row!($conf, $prefix, "_max_temp_file_size", gale_config::Takes::Exactly(1),
                "1024m", "How long the temporary file of a response may become; 0 for none.",
                values size, max_temp_file_size),
            $crate::http::upstream_rows::row!($conf, $prefix, "_temp_file_write_size", gale_config::Takes::Exactly(1),
                "", "Checked; writes have a size of their own.", values size, temp_file_write_size),
            $crate::http::upstream_rows::row!($conf, $prefix, "_temp_path", gale_config::Takes::Between(1, 4), "",
                concat!("Where temporary files of responses are; else ", $temp, "."), with temp_path, temp_path),
            $crate::http::upstream_rows::row!($conf, $prefix, "_ignore_client_abort", gale_config::Takes::Flag, "off",
                "Whether a request goes on when its client has left.", values flag, ignore_client_abort),
            $crate::http::upstream_rows::row!($conf, $prefix, "_force_ranges", gale_config::Takes::Flag, "off",
                "Whether parts of a response can be had although the server offers none.",
                values flag, force_ranges),
            $crate::http::upstream_rows::row!($conf, $prefix, "_limit_rate", gale_config::Takes::Exactly(1), "0",
                "How many bytes of a response are read in a second; 0 for no limit.", with size_template, limit_rate),
            $crate::http::upstream_rows::row!($conf, $prefix, "_pass_request_headers", gale_config::Takes::Flag, "on",
                "Whether the client's fields are passed on.", values flag, pass_request_headers),
            $crate::http::upstream_rows::row!($conf, $prefix, "_pass_request_body", gale_config::Takes::Flag, "on",
                "Whether the request's body is passed on.", values flag, pass_request_body),
            $($own,)*
        ])
    };
}

/// One row of them.
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

/// The rows of a module that speaks TLS with servers, if it is asked to: those of [`upstream_rows`] and `…_ssl_…`.
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

/// A row of a module's own, for every scope.
pub(crate) const fn own_row(
    name: &'static str,
    takes: Takes,
    default: &'static str,
    about: &'static str,
    store: &'static dyn Store<Builder>,
) -> Directive {
    Directive { name, contexts: Contexts::ANYWHERE, takes, body: Body::None, default, about, store }
}

/// Completes the settings of a scope whose rows have been inherited and set. `directory` is that of temporary files
/// below Gale's own, needed if the scope passes requests on; `hidden` are the fields that clients do not get unless
/// they are passed by name.
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

/// Has the files read that TLS to servers needs, for a scope that may speak it.
pub(crate) fn prepare_tls(
    settings: &mut UpstreamSettings,
    builder: &mut Builder,
    prefix: &'static str,
) -> Result<(), Diagnostic> {
    let client = Arc::default();
    settings.tls_certificate = match (settings.tls.certificate.get_opt(), settings.tls.key.get_opt()) {
        (Some(certificate), Some(key)) if settings.tls.names_certificate() => {
            Some((builder.http_mut().template(certificate)?, builder.http_mut().template(key)?))
        }
        _ => None,
    };
    settings.tls_client = Some(Arc::clone(&client));
    builder.http_mut().tls_clients.push(TlsClientDraft { settings: settings.tls.clone(), prefix, client });
    Ok(())
}

/// Gives a value to what has no directive in a module.
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
    // As in nginx: applications are not asked for these.
    let is_of_proxy = |text: &str| matches!(text, "http_502" | "http_504");
    let is_proxy = [&b"proxy_"[..], b"grpc_"].iter().any(|prefix| statement.name.text.starts_with(prefix));
    let words = RetryOn::WORDS.iter().filter(|(text, _)| is_proxy || !is_of_proxy(text));
    retry_on(builder, statement, earlier, &words.copied().collect::<Vec<_>>())
}

/// What these words, with their bits, say beside what earlier statements of the block do.
pub(crate) fn retry_on(
    builder: &mut Builder,
    statement: &Statement,
    earlier: Option<&RetryOn>,
    words: &[(&str, u32)],
) -> Result<RetryOn, Diagnostic> {
    let earlier = earlier.map(|earlier| earlier.bits());
    values::bitmask(statement, words, earlier.as_ref(), &mut builder.diagnostics).map(|bits| {
        let retry_on = RetryOn::of(bits);
        // As in nginx: nothing else counts beside it.
        if retry_on.has(RetryOn::OFF) { RetryOn::OFF } else { retry_on }
    })
}

/// `memcached_next_upstream`, which has words of its own.
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

/// `tunnel_next_upstream`: a server that is only connected to cannot answer wrongly.
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
