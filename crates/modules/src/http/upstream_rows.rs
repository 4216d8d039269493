//! The directives that every module has that passes requests on: `proxy_read_timeout`, `fastcgi_read_timeout` and so
//! on. One macro makes the rows, one function completes the settings.
//! (<https://nginx.org/en/docs/http/ngx_http_proxy_module.html>)

use std::sync::Arc;

use bstr::{BString, ByteSlice};
use gale_base::units;
use gale_config::{Body, Contexts, Diagnostic, Setting, Statement, Store, Takes, Word, values};
use gale_engine::configuration::Builder;
use gale_engine::module::Directive;
use gale_engine::spool::TempPath;
use gale_http::configuration::builder::{InHttp, TlsClientDraft};
use gale_http::request::Request;
use gale_http::upstream::PassingTls;
use gale_http::upstream::settings::{Bind, Ignored, RetryOn, UpstreamSettings, parse_bind};
use gale_http::variables::template::{SizeTemplate, Template};

/// The rows of a module whose settings have an [`UpstreamSettings`] called `upstream`, with further rows behind them.
macro_rules! upstream_rows {
    ($conf:ty, $prefix:literal, $temp:literal, [$($own:expr),* $(,)?]) => {
        &[
            $crate::http::upstream_rows::row!($conf, $prefix, "_bind", gale_config::Takes::Between(1, 2), "off",
                "The address that connections to servers come from.", with bind, bind),
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
            $crate::http::upstream_rows::row!($conf, $prefix, "_next_upstream", gale_config::Takes::AtLeast(1),
                "error timeout", "What has the next server of a group tried.", with next_upstream, next_upstream),
            $crate::http::upstream_rows::row!($conf, $prefix, "_next_upstream_tries", gale_config::Takes::Exactly(1),
                "0", "How many servers are tried; 0 for all.", values number, next_upstream_tries),
            $crate::http::upstream_rows::row!($conf, $prefix, "_next_upstream_timeout", gale_config::Takes::Exactly(1),
                "0", "For how long servers are tried; 0 for ever.", values time_ms, next_upstream_timeout),
            $crate::http::upstream_rows::row!($conf, $prefix, "_buffer_size", gale_config::Takes::Exactly(1), "4k",
                "How long the head of a response may be.", values size, buffer_size),
            $crate::http::upstream_rows::row!($conf, $prefix, "_buffers", gale_config::Takes::Exactly(2), "8 4k",
                "How much of a response may be ahead of its client in memory.", values buffers, buffers),
            $crate::http::upstream_rows::row!($conf, $prefix, "_busy_buffers_size", gale_config::Takes::Exactly(1), "",
                "Checked; what is on its way to the client has bounds of its own.", values size, busy_buffers_size),
            $crate::http::upstream_rows::row!($conf, $prefix, "_buffering", gale_config::Takes::Flag, "on",
                "Whether responses are read as fast as they come.", values flag, buffering),
            $crate::http::upstream_rows::row!($conf, $prefix, "_request_buffering", gale_config::Takes::Flag, "on",
                "Whether a request's body is read to its end before a server is asked.",
                values flag, request_buffering),
            $crate::http::upstream_rows::row!($conf, $prefix, "_max_temp_file_size", gale_config::Takes::Exactly(1),
                "1024m", "How long the temporary file of a response may become; 0 for none.",
                values size, max_temp_file_size),
            $crate::http::upstream_rows::row!($conf, $prefix, "_temp_file_write_size", gale_config::Takes::Exactly(1),
                "", "Checked; writes have a size of their own.", values size, temp_file_write_size),
            $crate::http::upstream_rows::row!($conf, $prefix, "_temp_path", gale_config::Takes::Between(1, 4), "",
                concat!("Where temporary files of responses are; else ", $temp, "."), with temp_path, temp_path),
            $crate::http::upstream_rows::row!($conf, $prefix, "_ignore_client_abort", gale_config::Takes::Flag, "off",
                "Whether a request goes on when its client has left.", values flag, ignore_client_abort),
            $crate::http::upstream_rows::row!($conf, $prefix, "_intercept_errors", gale_config::Takes::Flag, "off",
                "Whether error_page is for the errors of servers, too.", values flag, intercept_errors),
            $crate::http::upstream_rows::row!($conf, $prefix, "_force_ranges", gale_config::Takes::Flag, "off",
                "Whether parts of a response can be had although the server offers none.",
                values flag, force_ranges),
            $crate::http::upstream_rows::row!($conf, $prefix, "_limit_rate", gale_config::Takes::Exactly(1), "0",
                "How many bytes of a response are read in a second; 0 for no limit.", with limit_rate, limit_rate),
            $crate::http::upstream_rows::row!($conf, $prefix, "_pass_request_headers", gale_config::Takes::Flag, "on",
                "Whether the client's fields are passed on.", values flag, pass_request_headers),
            $crate::http::upstream_rows::row!($conf, $prefix, "_pass_request_body", gale_config::Takes::Flag, "on",
                "Whether the request's body is passed on.", values flag, pass_request_body),
            $crate::http::upstream_rows::row!($conf, $prefix, "_hide_header", gale_config::Takes::Exactly(1), "",
                "A field of responses that clients do not get.", many field_name, hide_header),
            $crate::http::upstream_rows::row!($conf, $prefix, "_pass_header", gale_config::Takes::Exactly(1), "",
                "A field of responses that clients get although they usually do not.", many field_name, pass_header),
            $crate::http::upstream_rows::row!($conf, $prefix, "_ignore_headers", gale_config::Takes::AtLeast(1), "",
                "Fields of responses that have no effect here.", with ignore_headers, ignore_headers),
            $($own,)*
        ]
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
     many $parse:ident, $field:ident) => {
        $crate::http::upstream_rows::row!(@ $prefix, $name, $takes, $default, $about, &gale_config::Many {
            parse: $crate::http::upstream_rows::$parse, slot: gale_config::slot!($conf, upstream.$field) })
    };
}

/// The rows of a module that speaks TLS with servers, if it is asked to: those of [`upstream_rows`] and `…_ssl_…`.
/// (<https://nginx.org/en/docs/http/ngx_http_proxy_module.html#proxy_ssl_certificate>)
macro_rules! upstream_ssl_rows {
    ($conf:ty, $prefix:literal, $temp:literal, [$($own:expr),* $(,)?]) => {
        $crate::http::upstream_rows::upstream_rows!($conf, $prefix, $temp, [
            $($own,)*
            $crate::http::upstream_rows::row!(@ $prefix, "_ssl_protocols", gale_config::Takes::AtLeast(1),
                "TLSv1.2 TLSv1.3", "The versions of TLS that are spoken with servers.",
                &gale_config::OneWith { parse: $crate::http::ssl::versions,
                    slot: gale_config::slot!($conf, upstream.tls.versions) }),
            $crate::http::upstream_rows::row!(@ $prefix, "_ssl_ciphers", gale_config::Takes::Exactly(1), "DEFAULT",
                "The cipher suites of TLSv1.2, as OpenSSL writes lists of them.",
                &gale_config::One { parse: gale_config::values::string,
                    slot: gale_config::slot!($conf, upstream.tls.ciphers) }),
            $crate::http::upstream_rows::row!(@ $prefix, "_ssl_name", gale_config::Takes::Exactly(1), "",
                "The name that a server's certificate is to have; else the host of the URL.",
                &gale_config::OneWith { parse: $crate::http::upstream_rows::template,
                    slot: gale_config::slot!($conf, upstream.tls_name) }),
            $crate::http::upstream_rows::row!(@ $prefix, "_ssl_server_name", gale_config::Takes::Flag, "off",
                "Whether servers are told the name (SNI).",
                &gale_config::One { parse: gale_config::values::flag,
                    slot: gale_config::slot!($conf, upstream.tls.tells_name) }),
            $crate::http::upstream_rows::row!(@ $prefix, "_ssl_verify", gale_config::Takes::Flag, "off",
                "Whether certificates of servers are verified.",
                &gale_config::One { parse: gale_config::values::flag,
                    slot: gale_config::slot!($conf, upstream.tls.verifies) }),
            $crate::http::upstream_rows::row!(@ $prefix, "_ssl_verify_depth", gale_config::Takes::Exactly(1), "1",
                "How many certificates may stand between a server's and its authority's.",
                &gale_config::One { parse: gale_config::values::number,
                    slot: gale_config::slot!($conf, upstream.tls.verify_depth) }),
            $crate::http::upstream_rows::row!(@ $prefix, "_ssl_trusted_certificate", gale_config::Takes::Exactly(1),
                "", "The authorities of servers' certificates.",
                &gale_config::OneWith { parse: $crate::http::upstream_rows::certificate,
                    slot: gale_config::slot!($conf, upstream.tls.trusted_certificate) }),
            $crate::http::upstream_rows::row!(@ $prefix, "_ssl_crl", gale_config::Takes::Exactly(1), "",
                "Lists of certificates of servers that were revoked.",
                &gale_config::OneWith { parse: $crate::http::upstream_rows::certificate,
                    slot: gale_config::slot!($conf, upstream.tls.crl) }),
            $crate::http::upstream_rows::row!(@ $prefix, "_ssl_certificate", gale_config::Takes::Exactly(1), "",
                "The certificate that servers are shown which ask for one.",
                &gale_config::OneWith { parse: $crate::http::upstream_rows::certificate,
                    slot: gale_config::slot!($conf, upstream.tls.certificate) }),
            $crate::http::upstream_rows::row!(@ $prefix, "_ssl_certificate_key", gale_config::Takes::Exactly(1), "",
                "The key of that certificate.",
                &gale_config::OneWith { parse: $crate::http::upstream_rows::certificate,
                    slot: gale_config::slot!($conf, upstream.tls.key) }),
            $crate::http::upstream_rows::row!(@ $prefix, "_ssl_certificate_cache", gale_config::Takes::Between(1, 3),
                "off", "Where certificates with variables are kept, which there are none of.",
                &gale_config::Custom(|_: &mut (), builder, statement| $crate::http::ssl::without_effect(
                    builder, statement, "certificates are read with the configuration"))),
            $crate::http::upstream_rows::row!(@ $prefix, "_ssl_password_file", gale_config::Takes::Exactly(1), "",
                "Passwords of keys, which must not have any yet.",
                &gale_config::Custom(|_: &mut (), builder, statement| $crate::http::ssl::without_effect(
                    builder, statement, "keys with a password are not supported yet"))),
            $crate::http::upstream_rows::row!(@ $prefix, "_ssl_conf_command", gale_config::Takes::Exactly(2), "",
                "A command for OpenSSL, which is not there.",
                &gale_config::Custom(|_: &mut (), builder, statement| $crate::http::ssl::without_effect(
                    builder, statement, "OpenSSL is not used"))),
            $crate::http::upstream_rows::row!(@ $prefix, "_ssl_session_reuse", gale_config::Takes::Flag, "on",
                "Whether earlier sessions are resumed.",
                &gale_config::One { parse: gale_config::values::flag,
                    slot: gale_config::slot!($conf, upstream.tls.reuses_sessions) }),
        ])
    };
}

pub(crate) use {row, upstream_rows, upstream_ssl_rows};

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
/// below Gale's own, needed if the scope passes requests on; `hidden` are the fields that clients do not get unless they are passed by name.
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
pub(crate) fn prepare_tls(settings: &mut UpstreamSettings, builder: &mut Builder, prefix: &'static str) {
    let client = Arc::default();
    settings.tls_client = Some(Arc::clone(&client));
    builder.http_mut().tls_clients.push(TlsClientDraft { settings: settings.tls.clone(), prefix, client });
}

/// How a request is passed on over TLS to a server that the URL calls `host`.
pub(crate) fn tls(request: &Request, settings: &UpstreamSettings, host: &[u8]) -> PassingTls {
    let client = settings.tls_client.as_ref().and_then(|client| client.get());
    let client = Arc::clone(client.expect("scopes that may speak TLS were prepared for it"));
    let name = match settings.tls_name.get_opt() {
        Some(name) => name.evaluate(request),
        None => host.to_vec(),
    };
    PassingTls { client, name: without_port(&name).into() }
}

/// A host without the port behind it, as nginx finds it.
fn without_port(host: &[u8]) -> &[u8] {
    let behind_address = if host.starts_with(b"[") { host.find_byte(b']').unwrap_or(0) } else { 0 };
    let colon = host[behind_address..].find_byte(b':').map(|colon| behind_address + colon);
    &host[..colon.unwrap_or(host.len())]
}

pub(crate) fn template(builder: &mut Builder, statement: &Statement) -> Result<Template, Diagnostic> {
    builder.http_mut().template(&statement.args[0])
}

/// A file with certificates, or with a key; an empty name is none.
pub(crate) fn certificate(builder: &mut Builder, statement: &Statement) -> Result<Word, Diagnostic> {
    match statement.args[0].text.is_empty() {
        true => Ok(statement.args[0].clone()),
        false => super::ssl::certificate(builder, statement),
    }
}

/// Gives a value to what has no directive in a module.
pub(crate) fn fix<T>(setting: &mut Setting<T>, value: T) {
    if !setting.is_set() {
        setting.set(value, None);
    }
}

pub(crate) fn bind(builder: &mut Builder, statement: &Statement) -> Result<Option<Bind>, Diagnostic> {
    let address = &statement.args[0];
    let is_transparent = match statement.args.get(1) {
        None => false,
        Some(word) if &**word.text == b"transparent" => true,
        Some(word) => {
            return Err(Diagnostic::emerg(format!("invalid parameter \"{}\"", word.text)).at(word.span));
        }
    };
    if &**address.text == b"off" && statement.args.len() == 1 {
        return Ok(None);
    }
    let template = builder.http_mut().template(address)?;
    if template.as_constant().is_some_and(|text| parse_bind(text).is_none()) {
        return Err(Diagnostic::emerg(format!("invalid address \"{}\"", address.text)).at(address.span));
    }
    Ok(Some(Bind { address: template, is_transparent }))
}

pub(crate) fn next_upstream(builder: &mut Builder, statement: &Statement) -> Result<RetryOn, Diagnostic> {
    // As in nginx: applications are not asked for these.
    let is_of_proxy = |text: &str| matches!(text, "http_502" | "http_504");
    let is_proxy = statement.name.text.starts_with(b"proxy_");
    let words = RetryOn::WORDS.iter().filter(|(text, _)| is_proxy || !is_of_proxy(text));
    retry_on(builder, statement, &words.copied().collect::<Vec<_>>())
}

/// What one of these words, with their bits, says.
fn retry_on(builder: &mut Builder, statement: &Statement, words: &[(&str, u32)]) -> Result<RetryOn, Diagnostic> {
    values::bitmask(statement, words, &mut builder.diagnostics).map(|bits| {
        let retry_on = RetryOn::of(bits);
        // As in nginx: nothing else counts beside it.
        if retry_on.has(RetryOn::OFF) { RetryOn::OFF } else { retry_on }
    })
}

/// `memcached_next_upstream`, which has words of its own.
pub(crate) fn memcached_next_upstream(builder: &mut Builder, statement: &Statement) -> Result<RetryOn, Diagnostic> {
    let word = |&(name, bit): &(&'static str, u32)| match name {
        "error" | "timeout" | "off" => Some((name, bit)),
        "invalid_header" => Some(("invalid_response", bit)),
        "http_404" => Some(("not_found", bit)),
        _ => None,
    };
    retry_on(builder, statement, &RetryOn::WORDS.iter().filter_map(word).collect::<Vec<_>>())
}

pub(crate) fn ignore_headers(builder: &mut Builder, statement: &Statement) -> Result<Ignored, Diagnostic> {
    values::bitmask(statement, Ignored::WORDS, &mut builder.diagnostics).map(Ignored::of)
}

pub(crate) fn limit_rate(builder: &mut Builder, statement: &Statement) -> Result<SizeTemplate, Diagnostic> {
    let text = builder.http_mut().template(&statement.args[0])?;
    SizeTemplate::new(text).ok_or_else(|| statement.directive_error("invalid value").at(statement.args[0].span))
}

pub(crate) fn temp_path(builder: &mut Builder, statement: &Statement) -> Result<TempPath, Diagnostic> {
    let level = |word: &Word| match units::parse_number(&word.text) {
        Some(length @ 1..=3) => Ok(length as u8),
        _ => Err(statement.directive_error("invalid value").at(word.span).hint("a level has 1 to 3 characters")),
    };
    let levels = statement.args[1..].iter().map(level).collect::<Result<_, _>>()?;
    Ok(TempPath { path: builder.full_path(&statement.args[0].text).into(), levels })
}

/// `*_send_lowat`
pub(crate) fn send_lowat(builder: &mut Builder, statement: &Statement) -> Result<u64, Diagnostic> {
    let size = values::size(statement)?;
    let message = format!("\"{}\" is not supported, ignored", statement.name.text);
    builder.note([Diagnostic::warn(message).at(statement.span)]);
    Ok(size)
}

pub(crate) fn field_name(statement: &Statement) -> Result<BString, Diagnostic> {
    values::string(statement)
}
