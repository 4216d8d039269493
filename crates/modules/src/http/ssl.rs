//! ssl: TLS of servers.
//!   ssl_certificate FILE;  ssl_certificate_key FILE;         http, server; several pairs
//!   ssl_protocols …;  ssl_ciphers LIST;  ssl_prefer_server_ciphers on|off;  ssl_ecdh_curve LIST;
//!   ssl_session_cache …;  ssl_session_tickets on|off;  ssl_session_ticket_key FILE;  ssl_session_timeout TIME;
//!   ssl_verify_client on|off|optional|optional_no_ca;  ssl_verify_depth N;
//!   ssl_client_certificate FILE;  ssl_trusted_certificate FILE;  ssl_crl FILE;
//!   ssl_buffer_size SIZE;  ssl_reject_handshake on|off;
//!   ssl_dhparam FILE;  ssl_conf_command NAME VALUE;          accepted, without effect
//!   $ssl_protocol, $ssl_cipher, $ssl_curve, $ssl_server_name, $ssl_session_reused, $ssl_client_…
//! (<https://nginx.org/en/docs/http/ngx_http_ssl_module.html>)
//!
//! What is spoken and how is the engine's ([`gale_engine::tls`]).

use bstr::{BStr, BString, ByteSlice};
use gale_base::units;
use gale_config::{Body, Contexts, Custom, Diagnostic, ManyWith, One, OneWith, Statement, Takes, Word, slot, values};
use gale_engine::configuration::Builder;
use gale_engine::module::{ConfType, Directive, Module};
use gale_engine::tls::settings::{SessionCache, TlsSettings, VerifyClient, Versions};
use gale_engine::tls::{Certificate, TlsDetails};
use gale_http::module::HttpPart;
use gale_http::request::Request;
use gale_http::variables::Variable;
use gale_protocol::uri::escape::{Class, escape};

/// See the file's head.
pub static MODULE: Module = Module {
    name: "http_ssl",
    directives: DIRECTIVES,
    conf: Some(ConfType::of::<TlsSettings>()),
    parts: &[&HttpPart { variables: VARIABLES, ..HttpPart::EMPTY }],
};

const PLACE: Contexts = Contexts::HTTP.or(Contexts::SERVER);

/// OpenSSL's own number of sessions where `builtin` does not say.
const BUILTIN_SESSIONS: u64 = 20 * 1024;

/// The smallest shared cache: eight pages, as in nginx.
const CACHE_BYTES_MIN: u64 = 8 * 4096;

const DIRECTIVES: &[Directive] = &[
    Directive {
        name: "ssl_certificate",
        contexts: PLACE,
        takes: Takes::Exactly(1),
        body: Body::None,
        default: "",
        about: "The server's certificate, with those that lead to its authority behind it, in PEM.",
        store: &ManyWith { parse: certificate, slot: slot!(TlsSettings, certificates) },
    },
    Directive {
        name: "ssl_certificate_key",
        contexts: PLACE,
        takes: Takes::Exactly(1),
        body: Body::None,
        default: "",
        about: "The key of the certificate.",
        store: &ManyWith { parse: certificate, slot: slot!(TlsSettings, keys) },
    },
    Directive {
        name: "ssl_protocols",
        contexts: PLACE,
        takes: Takes::AtLeast(1),
        body: Body::None,
        default: "TLSv1.2 TLSv1.3",
        about: "The versions that are spoken; those before TLSv1.2 never are.",
        store: &OneWith { parse: versions, slot: slot!(TlsSettings, versions) },
    },
    Directive {
        name: "ssl_ciphers",
        contexts: PLACE,
        takes: Takes::Exactly(1),
        body: Body::None,
        default: "HIGH:!aNULL:!MD5",
        about: "The cipher suites of TLSv1.2, as OpenSSL writes lists of them.",
        store: &One { parse: values::string, slot: slot!(TlsSettings, ciphers) },
    },
    Directive {
        name: "ssl_prefer_server_ciphers",
        contexts: PLACE,
        takes: Takes::Flag,
        body: Body::None,
        default: "off",
        about: "Whether the server's order of cipher suites counts, or the client's.",
        store: &One { parse: values::flag, slot: slot!(TlsSettings, prefers_own_ciphers) },
    },
    Directive {
        name: "ssl_ecdh_curve",
        contexts: PLACE,
        takes: Takes::Exactly(1),
        body: Body::None,
        default: "auto",
        about: "The groups for the exchange of keys.",
        store: &One { parse: values::string, slot: slot!(TlsSettings, curves) },
    },
    Directive {
        name: "ssl_buffer_size",
        contexts: PLACE,
        takes: Takes::Exactly(1),
        body: Body::None,
        default: "16k",
        about: "The most that a record holds; the first ones of an answer hold less.",
        store: &One { parse: values::size, slot: slot!(TlsSettings, buffer_size) },
    },
    Directive {
        name: "ssl_session_cache",
        contexts: PLACE,
        takes: Takes::Between(1, 2),
        body: Body::None,
        default: "none",
        about: "Where sessions are kept whose clients have no tickets: off, none, builtin[:SESSIONS], shared:NAME:SIZE.",
        store: &One { parse: session_cache, slot: slot!(TlsSettings, session_cache) },
    },
    Directive {
        name: "ssl_session_tickets",
        contexts: PLACE,
        takes: Takes::Flag,
        body: Body::None,
        default: "on",
        about: "Whether clients get tickets, with which they come back to their sessions.",
        store: &One { parse: values::flag, slot: slot!(TlsSettings, session_tickets) },
    },
    Directive {
        name: "ssl_session_ticket_key",
        contexts: PLACE,
        takes: Takes::Exactly(1),
        body: Body::None,
        default: "",
        about: "A file with the key of tickets; the first of several encrypts.",
        store: &ManyWith { parse: path, slot: slot!(TlsSettings, ticket_keys) },
    },
    Directive {
        name: "ssl_session_timeout",
        contexts: PLACE,
        takes: Takes::Exactly(1),
        body: Body::None,
        default: "5m",
        about: "How long clients may come back to a session.",
        store: &One { parse: values::time_s, slot: slot!(TlsSettings, session_timeout) },
    },
    Directive {
        name: "ssl_verify_client",
        contexts: PLACE,
        takes: Takes::Exactly(1),
        body: Body::None,
        default: "off",
        about: "Whether clients are asked for a certificate: off, on, optional, optional_no_ca.",
        store: &One { parse: verify_client, slot: slot!(TlsSettings, verify_client) },
    },
    Directive {
        name: "ssl_verify_depth",
        contexts: PLACE,
        takes: Takes::Exactly(1),
        body: Body::None,
        default: "1",
        about: "How many certificates may stand between a client's and its authority's.",
        store: &One { parse: values::number, slot: slot!(TlsSettings, verify_depth) },
    },
    Directive {
        name: "ssl_client_certificate",
        contexts: PLACE,
        takes: Takes::Exactly(1),
        body: Body::None,
        default: "",
        about: "The authorities of clients' certificates, which clients are told of.",
        store: &OneWith { parse: path, slot: slot!(TlsSettings, client_certificate) },
    },
    Directive {
        name: "ssl_trusted_certificate",
        contexts: PLACE,
        takes: Takes::Exactly(1),
        body: Body::None,
        default: "",
        about: "Authorities of clients' certificates, which clients are not told of.",
        store: &OneWith { parse: path, slot: slot!(TlsSettings, trusted_certificate) },
    },
    Directive {
        name: "ssl_crl",
        contexts: PLACE,
        takes: Takes::Exactly(1),
        body: Body::None,
        default: "",
        about: "Lists of certificates of clients that were revoked.",
        store: &OneWith { parse: path, slot: slot!(TlsSettings, crl) },
    },
    Directive {
        name: "ssl_reject_handshake",
        contexts: PLACE,
        takes: Takes::Flag,
        body: Body::None,
        default: "off",
        about: "Whether the server refuses every handshake.",
        store: &One { parse: values::flag, slot: slot!(TlsSettings, rejects_handshake) },
    },
    Directive {
        name: "ssl_dhparam",
        contexts: PLACE,
        takes: Takes::Exactly(1),
        body: Body::None,
        default: "",
        about: "Parameters of DHE, which is not spoken.",
        store: &Custom(|_: &mut (), builder, statement| {
            without_effect(builder, statement, "DHE is not spoken, ECDHE is")
        }),
    },
    Directive {
        name: "ssl_conf_command",
        contexts: PLACE,
        takes: Takes::Exactly(2),
        body: Body::None,
        default: "",
        about: "A command for OpenSSL, which is not there.",
        store: &Custom(|_: &mut (), builder, statement| without_effect(builder, statement, "OpenSSL is not used")),
    },
];

pub(super) fn without_effect(builder: &mut Builder, statement: &Statement, why: &str) -> Result<(), Diagnostic> {
    let message = format!("\"{}\" directive is accepted but has no effect: {why}", statement.name.text);
    builder.note([Diagnostic::warn(message).at(statement.name.span)]);
    Ok(())
}

/// A certificate's or a key's file, or the text itself.
pub(super) fn certificate(builder: &mut Builder, statement: &Statement) -> Result<Word, Diagnostic> {
    let word = &statement.args[0];
    if word.text.starts_with(b"data:") {
        return Ok(word.clone());
    }
    if word.text.starts_with(b"engine:") || word.text.starts_with(b"store:") {
        let (kind, _) = word.text.split_once_str(":").unwrap_or_default();
        let what = if statement.name.text.ends_with(b"_certificate") { "certificate" } else { "certificate key" };
        let message = format!("cannot load {what} \"{}\": \"{}:\" is not supported", word.text, BStr::new(kind));
        return Err(Diagnostic::emerg(message)
            .at(word.span)
            .hint("OpenSSL, which has engines and stores, is not used"));
    }
    if word.text.contains(&b'$') {
        let message = format!("variables are not supported in \"{}\"", statement.name.text);
        return Err(Diagnostic::emerg(message).at(word.span).hint("Gale does not have them here yet"));
    }
    path(builder, statement)
}

pub(super) fn path(builder: &mut Builder, statement: &Statement) -> Result<Word, Diagnostic> {
    use std::os::unix::ffi::OsStrExt;
    let mut word = statement.args[0].clone();
    word.text = BString::from(builder.full_path(&word.text).as_os_str().as_bytes());
    Ok(word)
}

pub(super) fn versions(builder: &mut Builder, statement: &Statement) -> Result<Versions, Diagnostic> {
    let mut versions = Versions { tls12: false, tls13: false };
    for word in &statement.args {
        match &**word.text {
            b"TLSv1.2" => versions.tls12 = true,
            b"TLSv1.3" => versions.tls13 = true,
            b"SSLv2" | b"SSLv3" | b"TLSv1" | b"TLSv1.1" => {
                let message = format!("{} is not spoken: it is broken or deprecated (RFC 8996)", word.text);
                builder.note([Diagnostic::warn(message).at(word.span)]);
            }
            _ => return Err(Diagnostic::emerg(format!("invalid value \"{}\"", word.text)).at(word.span)),
        }
    }
    if !versions.tls12 && !versions.tls13 {
        return Err(statement
            .error(format!("no version is left in \"{}\"", statement.name.text))
            .hint("Gale speaks TLSv1.2 and TLSv1.3"));
    }
    Ok(versions)
}

fn verify_client(statement: &Statement) -> Result<VerifyClient, Diagnostic> {
    values::enumeration(
        statement,
        &[
            ("off", VerifyClient::Off),
            ("on", VerifyClient::On),
            ("optional", VerifyClient::Optional),
            ("optional_no_ca", VerifyClient::OptionalNoCa),
        ],
    )
}

fn session_cache(statement: &Statement) -> Result<SessionCache, Diagnostic> {
    let mut cache = SessionCache::None;
    for word in &statement.args {
        let invalid = || Diagnostic::emerg(format!("invalid session cache \"{}\"", word.text)).at(word.span);
        let parts: Vec<&[u8]> = word.text.split_str(":").collect();
        cache = match parts.as_slice() {
            [b"off"] => SessionCache::Off,
            [b"none"] => SessionCache::None,
            // Beside a shared one it is nothing of its own.
            [b"builtin"] if matches!(cache, SessionCache::Shared(..)) => cache,
            [b"builtin"] => SessionCache::Builtin(BUILTIN_SESSIONS),
            [b"builtin", count] => match units::parse_number(count).filter(|&count| count > 0) {
                Some(_) if matches!(cache, SessionCache::Shared(..)) => cache,
                Some(count) => SessionCache::Builtin(count),
                None => return Err(invalid()),
            },
            [b"shared", name, size] if !name.is_empty() => {
                let size = units::parse_size(size).ok_or_else(invalid)?;
                if size < CACHE_BYTES_MIN {
                    let message = format!("session cache \"{}\" is too small", word.text);
                    return Err(Diagnostic::emerg(message).at(word.span));
                }
                SessionCache::Shared(BString::from(*name), size)
            }
            _ => return Err(invalid()),
        };
    }
    Ok(cache)
}

const VARIABLES: &[Variable] = &[
    Variable::named("ssl_protocol", |request, _, out| with(request, out, |details, out| push(out, details.version()))),
    Variable::named("ssl_cipher", |request, _, out| with(request, out, |details, out| push(out, details.cipher()))),
    Variable::named("ssl_curve", |request, _, out| {
        with(request, out, |details, out| details.curve().is_some_and(|curve| push(out, curve)))
    }),
    Variable::named("ssl_alpn_protocol", |request, _, out| {
        with(request, out, |details, out| details.alpn().is_some_and(|name| push(out, name)))
    }),
    Variable::named("ssl_server_name", |request, _, out| {
        with(request, out, |details, out| details.server_name().is_some_and(|name| push(out, name)))
    }),
    Variable::named("ssl_session_reused", |request, _, out| {
        with(request, out, |details, out| push(out, if details.is_resumed() { "r" } else { "." }))
    }),
    Variable::named("ssl_session_id", |request, _, out| with(request, out, |_, _| true)),
    Variable::named("ssl_early_data", |request, _, out| with(request, out, |_, _| false)),
    Variable::named("ssl_client_cert", |request, _, out| {
        of_client(request, out, |own| own.pem().trim_end().replace('\n', "\n\t"))
    }),
    Variable::named("ssl_client_raw_cert", |request, _, out| of_client(request, out, |own| own.pem())),
    Variable::named("ssl_client_escaped_cert", |request, _, out| {
        of_client(request, out, |own| {
            let mut escaped = Vec::new();
            escape(Class::Component, own.pem().as_bytes(), &mut escaped);
            escaped
        })
    }),
    Variable::named("ssl_client_s_dn", |request, _, out| of_client(request, out, |own| own.subject())),
    Variable::named("ssl_client_i_dn", |request, _, out| of_client(request, out, |own| own.issuer())),
    Variable::named("ssl_client_s_dn_legacy", |request, _, out| of_client(request, out, |own| own.subject_legacy())),
    Variable::named("ssl_client_i_dn_legacy", |request, _, out| of_client(request, out, |own| own.issuer_legacy())),
    Variable::named("ssl_client_serial", |request, _, out| of_client(request, out, |own| own.serial())),
    Variable::named("ssl_client_fingerprint", |request, _, out| of_client(request, out, |own| own.fingerprint())),
    Variable::named("ssl_client_v_start", |request, _, out| of_client(request, out, |own| own.valid_from())),
    Variable::named("ssl_client_v_end", |request, _, out| of_client(request, out, |own| own.valid_to())),
    Variable::named("ssl_client_v_remain", |request, _, out| {
        of_client(request, out, |own| own.days_left(gale_runtime::wall_seconds()).to_string())
    }),
    Variable::named("ssl_client_verify", |request, _, out| {
        with(request, out, |details, out| push(out, details.verdict().to_string()))
    }),
];

/// What `append` adds of the session; nothing in the clear.
fn with(request: &Request, out: &mut Vec<u8>, append: impl FnOnce(&TlsDetails<'_>, &mut Vec<u8>) -> bool) -> bool {
    request.exchange().tls().and_then(|stream| stream.details(|details| append(details, out))).unwrap_or(false)
}

/// What `text` says of the client's certificate; nothing without one.
fn of_client<T: AsRef<[u8]>>(request: &Request, out: &mut Vec<u8>, text: impl FnOnce(&Certificate<'_>) -> T) -> bool {
    with(request, out, |details, out| details.client_certificate().is_some_and(|own| push(out, text(&own))))
}

fn push(out: &mut Vec<u8>, text: impl AsRef<[u8]>) -> bool {
    out.extend_from_slice(text.as_ref());
    true
}
