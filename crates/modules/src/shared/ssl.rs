//! ssl: TLS for servers of any protocol.
//!   ssl_certificate FILE;  ssl_certificate_key FILE;         several pairs allowed
//!   ssl_protocols …;  ssl_ciphers LIST;  ssl_prefer_server_ciphers on|off;  ssl_ecdh_curve LIST;
//!   ssl_session_cache …;  ssl_session_tickets on|off;  ssl_session_ticket_key FILE;  ssl_session_timeout TIME;
//!   ssl_verify_client on|off|optional|optional_no_ca;  ssl_verify_depth N;
//!   ssl_client_certificate FILE;  ssl_trusted_certificate FILE;  ssl_crl FILE;
//!   ssl_buffer_size SIZE;  ssl_reject_handshake on|off;
//!   ssl_certificate_cache off|max=N [inactive=TIME] [valid=TIME];  ssl_password_file FILE;
//!   ssl_conf_command NAME VALUE;
//!   ssl_early_data on|off;  ssl_certificate_compression on|off;
//!   ssl_stapling on|off;  ssl_stapling_file FILE;  ssl_stapling_responder URL;  ssl_stapling_verify on|off;
//!   ssl_ocsp on|off|leaf;  ssl_ocsp_responder URL;  ssl_ocsp_cache off|shared:NAME:SIZE;
//!   ssl_dhparam FILE;                                        read, without effect
//!   ssl_ech_file FILE;                                       refused
//!   $ssl_protocol, $ssl_cipher, $ssl_curve, $ssl_server_name, $ssl_session_reused, $ssl_client_…
//!   $ssl_client_san                                          names in the client's certificate; Gale's own
//!   $ssl_ciphers, $ssl_curves, $ssl_sigalgs, $ssl_ja4        from the ClientHello
//! (<https://nginx.org/en/docs/http/ngx_http_ssl_module.html>)
//!
//! The contexts are http and server, in stream: stream and server. [`gale_tls`] implements TLS.

use std::ffi::OsStr;
use std::sync::Arc;
use std::time::Duration;

use bstr::{BStr, BString, ByteSlice};
use gale_base::units;
use gale_config::{
    Body, Contexts, Custom, Diagnostic, ManyWith, One, OneWith, Statement, Takes, Updated, Word, slot, values,
};
use gale_engine::configuration::Builder;
use gale_engine::module::Directive;
use gale_engine::variables::Variable;
use gale_engine::variables::subject::Subject;
use gale_protocol::client_hello::ClientHello;
use gale_protocol::uri::escape::{Class, escape};
use gale_tls::commands::Command;
use gale_tls::offered;
use gale_tls::settings::{AsksAbout, SessionCache, TlsSettings, VerifyClient, Versions};
use gale_tls::staple::Responder;
use gale_tls::{Certificate, CertificateCache, TlsDetails, TlsStream};

/// A subject whose connection may use TLS.
pub trait OverTls: Subject {
    /// Returns the TLS stream, if the connection has one.
    fn tls(&self) -> Option<&TlsStream>;
}

/// OpenSSL's default number of sessions, for `builtin` without a number.
const BUILTIN_SESSIONS: u64 = 20 * 1024;

/// Minimum size of a shared cache: eight pages, as in nginx.
const CACHE_BYTES_MIN: u64 = 8 * 4096;

/// Default time after which an unused certificate is removed from the cache.
const CACHE_INACTIVE: Duration = Duration::from_secs(10);

/// Default time for which a cached certificate is not read again.
const CACHE_VALID: Duration = Duration::from_secs(60);

/// Returns the directives for blocks in `contexts`. Their settings are [`TlsSettings`].
pub const fn directives(contexts: Contexts) -> [Directive; 30] {
    [
        Directive {
            name: "ssl_certificate",
            contexts,
            takes: Takes::Exactly(1),
            body: Body::None,
            default: "",
            about: "Specifies a file with the server certificate, followed by intermediate certificates, in the PEM \
                    format.",
            store: const { &ManyWith { parse: certificate, slot: slot!(TlsSettings, certificates) } },
        },
        Directive {
            name: "ssl_certificate_key",
            contexts,
            takes: Takes::Exactly(1),
            body: Body::None,
            default: "",
            about: "Specifies a file with the secret key of the server certificate.",
            store: const { &ManyWith { parse: certificate, slot: slot!(TlsSettings, keys) } },
        },
        Directive {
            name: "ssl_certificate_cache",
            contexts,
            takes: Takes::Between(1, 3),
            body: Body::None,
            default: "off",
            about: "Configures the cache of certificates and keys whose file names contain variables: off, or max=N \
                    [inactive=TIME] [valid=TIME].",
            store: const { &One { parse: certificate_cache, slot: slot!(TlsSettings, certificate_cache) } },
        },
        Directive {
            name: "ssl_password_file",
            contexts,
            takes: Takes::Exactly(1),
            body: Body::None,
            default: "",
            about: "Specifies a file with passphrases for secret keys, one per line.",
            store: const { &OneWith { parse: path, slot: slot!(TlsSettings, password_file) } },
        },
        Directive {
            name: "ssl_protocols",
            contexts,
            takes: Takes::AtLeast(1),
            body: Body::None,
            default: "TLSv1.2 TLSv1.3",
            about: "Enables TLS protocol versions; versions before TLSv1.2 are never enabled.",
            store: const { &Updated { parse: versions, slot: slot!(TlsSettings, versions) } },
        },
        Directive {
            name: "ssl_ciphers",
            contexts,
            takes: Takes::Exactly(1),
            body: Body::None,
            default: "HIGH:!aNULL:!MD5",
            about: "Specifies the enabled TLSv1.2 ciphers in the format of OpenSSL.",
            store: const { &One { parse: values::string, slot: slot!(TlsSettings, ciphers) } },
        },
        Directive {
            name: "ssl_prefer_server_ciphers",
            contexts,
            takes: Takes::Flag,
            body: Body::None,
            default: "off",
            about: "Enables or disables preference of server ciphers over client ciphers.",
            store: const { &One { parse: values::flag, slot: slot!(TlsSettings, prefers_own_ciphers) } },
        },
        Directive {
            name: "ssl_ecdh_curve",
            contexts,
            takes: Takes::Exactly(1),
            body: Body::None,
            default: "auto",
            about: "Specifies the groups (curves) for key exchange.",
            store: const { &One { parse: values::string, slot: slot!(TlsSettings, curves) } },
        },
        Directive {
            name: "ssl_buffer_size",
            contexts,
            takes: Takes::Exactly(1),
            body: Body::None,
            default: "16k",
            about: "Sets the maximum size of a TLS record; the first records of a response are smaller.",
            store: const { &One { parse: values::size, slot: slot!(TlsSettings, buffer_size) } },
        },
        Directive {
            name: "ssl_session_cache",
            contexts,
            takes: Takes::Between(1, 2),
            body: Body::None,
            default: "none",
            about: "Sets the type and size of the cache of sessions without tickets: off, none, builtin[:SESSIONS] or \
                    shared:NAME:SIZE.",
            store: const { &Updated { parse: session_cache, slot: slot!(TlsSettings, session_cache) } },
        },
        Directive {
            name: "ssl_session_tickets",
            contexts,
            takes: Takes::Flag,
            body: Body::None,
            default: "on",
            about: "Enables or disables session resumption through TLS session tickets.",
            store: const { &One { parse: values::flag, slot: slot!(TlsSettings, session_tickets) } },
        },
        Directive {
            name: "ssl_session_ticket_key",
            contexts,
            takes: Takes::Exactly(1),
            body: Body::None,
            default: "",
            about: "Specifies a file with the secret key of session tickets; the first of several encrypts.",
            store: const { &ManyWith { parse: path, slot: slot!(TlsSettings, ticket_keys) } },
        },
        Directive {
            name: "ssl_session_timeout",
            contexts,
            takes: Takes::Exactly(1),
            body: Body::None,
            default: "5m",
            about: "Sets the time during which a client may reuse a session.",
            store: const { &One { parse: values::time_s, slot: slot!(TlsSettings, session_timeout) } },
        },
        Directive {
            name: "ssl_verify_client",
            contexts,
            takes: Takes::Exactly(1),
            body: Body::None,
            default: "off",
            about: "Sets verification of client certificates: off, on, optional or optional_no_ca.",
            store: const { &One { parse: verify_client, slot: slot!(TlsSettings, verify_client) } },
        },
        Directive {
            name: "ssl_verify_depth",
            contexts,
            takes: Takes::Exactly(1),
            body: Body::None,
            default: "1",
            about: "Sets the verification depth in the client certificates chain.",
            store: const { &One { parse: values::number, slot: slot!(TlsSettings, verify_depth) } },
        },
        Directive {
            name: "ssl_client_certificate",
            contexts,
            takes: Takes::Exactly(1),
            body: Body::None,
            default: "",
            about: "Specifies a file with trusted CA certificates used to verify client certificates; their names are \
                    sent to clients.",
            store: const { &OneWith { parse: optional_path, slot: slot!(TlsSettings, client_certificate) } },
        },
        Directive {
            name: "ssl_trusted_certificate",
            contexts,
            takes: Takes::Exactly(1),
            body: Body::None,
            default: "",
            about: "Specifies a file with trusted CA certificates used to verify client certificates; their names are \
                    not sent to clients.",
            store: const { &OneWith { parse: optional_path, slot: slot!(TlsSettings, trusted_certificate) } },
        },
        Directive {
            name: "ssl_crl",
            contexts,
            takes: Takes::Exactly(1),
            body: Body::None,
            default: "",
            about: "Specifies a file with certificate revocation lists (CRL) used to verify client certificates.",
            store: const { &OneWith { parse: optional_path, slot: slot!(TlsSettings, crl) } },
        },
        Directive {
            name: "ssl_reject_handshake",
            contexts,
            takes: Takes::Flag,
            body: Body::None,
            default: "off",
            about: "Enables or disables rejection of all TLS handshakes in the server.",
            store: const { &One { parse: values::flag, slot: slot!(TlsSettings, rejects_handshake) } },
        },
        Directive {
            name: "ssl_certificate_compression",
            contexts,
            takes: Takes::Flag,
            body: Body::None,
            default: "off",
            about: "Enables or disables compression of the certificate in TLS handshakes.",
            store: const { &One { parse: values::flag, slot: slot!(TlsSettings, compresses_certificates) } },
        },
        Directive {
            name: "ssl_stapling",
            contexts,
            takes: Takes::Flag,
            body: Body::None,
            default: "off",
            about: "Enables or disables stapling of OCSP responses.",
            store: const { &One { parse: values::flag, slot: slot!(TlsSettings, staples) } },
        },
        Directive {
            name: "ssl_stapling_file",
            contexts,
            takes: Takes::Exactly(1),
            body: Body::None,
            default: "",
            about: "Specifies a file with the stapled OCSP response, instead of a query to the OCSP responder.",
            store: const { &OneWith { parse: path, slot: slot!(TlsSettings, stapling_file) } },
        },
        Directive {
            name: "ssl_stapling_responder",
            contexts,
            takes: Takes::Exactly(1),
            body: Body::None,
            default: "",
            about: "Sets the URL of the OCSP responder, instead of the one named in the certificate.",
            store: const { &One { parse: word, slot: slot!(TlsSettings, stapling_responder) } },
        },
        Directive {
            name: "ssl_stapling_verify",
            contexts,
            takes: Takes::Flag,
            body: Body::None,
            default: "off",
            about: "Enables or disables verification of OCSP responses.",
            store: const { &One { parse: values::flag, slot: slot!(TlsSettings, verifies_stapling) } },
        },
        Directive {
            name: "ssl_ocsp",
            contexts,
            takes: Takes::Exactly(1),
            body: Body::None,
            default: "off",
            about: "Enables OCSP validation of client certificates: on, leaf (only the client's own), or off.",
            store: const { &One { parse: ocsp, slot: slot!(TlsSettings, ocsp) } },
        },
        Directive {
            name: "ssl_ocsp_responder",
            contexts,
            takes: Takes::Exactly(1),
            body: Body::None,
            default: "",
            about: "Sets the URL of the OCSP responder, instead of the one named in the certificate.",
            store: const { &One { parse: ocsp_responder, slot: slot!(TlsSettings, ocsp_responder) } },
        },
        Directive {
            name: "ssl_ocsp_cache",
            contexts,
            takes: Takes::Exactly(1),
            body: Body::None,
            default: "off",
            about: "Sets the cache of OCSP responses about client certificates: off or shared:NAME:SIZE.",
            store: const { &One { parse: ocsp_cache, slot: slot!(TlsSettings, ocsp_cache) } },
        },
        Directive {
            name: "ssl_dhparam",
            contexts,
            takes: Takes::Exactly(1),
            body: Body::None,
            default: "",
            about: "No effect: DHE ciphers are not supported. The file is checked.",
            store: const { &OneWith { parse: dh_parameters, slot: slot!(TlsSettings, dh_parameters) } },
        },
        Directive {
            name: "ssl_ech_file",
            contexts,
            takes: Takes::Exactly(1),
            body: Body::None,
            default: "",
            about: "Not supported: the TLS library has Encrypted Client Hello for clients only.",
            store: const {
                &Custom(|_: &mut (), _, statement| {
                    let reason = "the TLS library knows Encrypted Client Hello for clients only";
                    Err(refused(statement, reason))
                })
            },
        },
        Directive {
            name: "ssl_conf_command",
            contexts,
            takes: Takes::Exactly(2),
            body: Body::None,
            default: "",
            about: "Sets an OpenSSL configuration command, if it has an equivalent in Gale.",
            store: const { &ManyWith { parse: conf_command, slot: slot!(TlsSettings, commands) } },
        },
    ]
}

/// Error: the directive is not supported, and ignoring it would give clients less than the configuration promises.
pub(crate) fn refused(statement: &Statement, reason: &'static str) -> Diagnostic {
    statement.error(format!("\"{}\" directive is not supported: {reason}", statement.name.text))
}

pub(crate) fn without_effect(builder: &mut Builder, statement: &Statement, why: &str) -> Result<(), Diagnostic> {
    let message = format!("\"{}\" directive is accepted but has no effect: {why}", statement.name.text);
    builder.note([Diagnostic::warn(message).at(statement.name.span)]);
    Ok(())
}

/// Parses the file of a certificate or key, or its literal text.
pub(crate) fn certificate(builder: &mut Builder, statement: &Statement) -> Result<Word, Diagnostic> {
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
            .hint("engines and stores belong to OpenSSL, which Gale does not use"));
    }
    // A name with variables is resolved against the prefix when their values are known.
    if word.text.contains(&b'$') {
        return Ok(word.clone());
    }
    path(builder, statement)
}

/// Parses `off`, or the number of certificates and keys to cache, and the times.
pub(crate) fn certificate_cache(statement: &Statement) -> Result<Option<Arc<CertificateCache>>, Diagnostic> {
    let (mut items_max, mut is_off) = (None, false);
    let (mut inactive, mut valid) = (CACHE_INACTIVE, CACHE_VALID);
    for word in &statement.args {
        let invalid = || Diagnostic::emerg(format!("invalid parameter \"{}\"", word.text)).at(word.span);
        let (name, value) = word.text.split_once_str("=").unwrap_or((&word.text, b""));
        let time = || units::parse_time_seconds(value).ok_or_else(invalid);
        match name {
            b"max" => {
                let number = units::parse_number(value).and_then(|number| usize::try_from(number).ok());
                items_max = Some(number.filter(|&number| number > 0).ok_or_else(invalid)?);
            }
            b"inactive" => inactive = time()?,
            b"valid" => valid = time()?,
            b"off" if word.text == "off" => is_off = true,
            _ => return Err(invalid()),
        }
    }
    if is_off {
        return Ok(None);
    }
    let missing = || statement.error(format!("\"{}\" must have the \"max\" parameter", statement.name.text));
    Ok(Some(Arc::new(CertificateCache::new(items_max.ok_or_else(missing)?, inactive, valid))))
}

/// Parses a command with its value.
pub(crate) fn conf_command(builder: &mut Builder, statement: &Statement) -> Result<Command, Diagnostic> {
    let mut command = Command { name: statement.args[0].clone(), value: statement.args[1].clone() };
    if command.is_of_file() {
        complete_path(builder, &mut command.value);
    }
    Ok(command)
}

/// Returns a file's path; as in nginx a relative one is taken from the directory of the configuration file.
pub(crate) fn path(builder: &mut Builder, statement: &Statement) -> Result<Word, Diagnostic> {
    let mut word = statement.args[0].clone();
    complete_path(builder, &mut word);
    Ok(word)
}

/// As `path`, but an empty name means no file.
fn optional_path(builder: &mut Builder, statement: &Statement) -> Result<Word, Diagnostic> {
    match statement.args[0].text.is_empty() {
        true => Ok(statement.args[0].clone()),
        false => path(builder, statement),
    }
}

fn dh_parameters(builder: &mut Builder, statement: &Statement) -> Result<Word, Diagnostic> {
    without_effect(builder, statement, "DHE is not supported, only ECDHE")?;
    optional_path(builder, statement)
}

fn complete_path(builder: &Builder, word: &mut Word) {
    use std::os::unix::ffi::OsStrExt;
    let path = builder.configuration_directory.join(OsStr::from_bytes(&word.text));
    word.text = BString::from(path.as_os_str().as_bytes());
}

/// Parses protocol versions; those of several statements in a block add up.
pub(crate) fn versions(
    builder: &mut Builder,
    statement: &Statement,
    earlier: Option<&Versions>,
) -> Result<Versions, Diagnostic> {
    let mut versions = earlier.copied().unwrap_or(Versions { tls12: false, tls13: false });
    for word in &statement.args {
        let mut add = |is_named: &mut bool| {
            if std::mem::replace(is_named, true) {
                builder.note([Diagnostic::warn(format!("duplicate value \"{}\"", word.text)).at(word.span)]);
            }
        };
        match &**word.text {
            b"TLSv1.2" => add(&mut versions.tls12),
            b"TLSv1.3" => add(&mut versions.tls13),
            b"SSLv2" | b"SSLv3" | b"TLSv1" | b"TLSv1.1" => {
                let message = format!("{} is not supported: it is insecure or deprecated (RFC 8996)", word.text);
                builder.note([Diagnostic::warn(message).at(word.span)]);
            }
            _ => return Err(Diagnostic::emerg(format!("invalid value \"{}\"", word.text)).at(word.span)),
        }
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

fn word(statement: &Statement) -> Result<Word, Diagnostic> {
    Ok(statement.args[0].clone())
}

/// Returns `ssl_early_data`, for protocols that can tell safe requests from others: http.
pub const fn early_data(contexts: Contexts) -> Directive {
    Directive {
        name: "ssl_early_data",
        contexts,
        takes: Takes::Flag,
        body: Body::None,
        default: "off",
        about: "Enables or disables TLS 1.3 early data (0-RTT).",
        store: const { &One { parse: values::flag, slot: slot!(TlsSettings, early_data) } },
    }
}

fn ocsp(statement: &Statement) -> Result<AsksAbout, Diagnostic> {
    let words = [("off", AsksAbout::Nothing), ("on", AsksAbout::Chain), ("leaf", AsksAbout::Leaf)];
    values::enumeration(statement, &words)
}

fn ocsp_responder(statement: &Statement) -> Result<Word, Diagnostic> {
    let word = &statement.args[0];
    Responder::parse(&word.text.to_str_lossy()).map(|_| word.clone()).map_err(|why| {
        let message = format!("{why} in OCSP responder \"{}\" in \"ssl_ocsp_responder\"", word.text);
        Diagnostic::emerg(message).at(word.span)
    })
}

fn ocsp_cache(statement: &Statement) -> Result<Option<(BString, u64)>, Diagnostic> {
    let word = &statement.args[0];
    let invalid = |message: String| Diagnostic::emerg(message).at(word.span);
    let parts: Vec<&[u8]> = word.text.split_str(":").collect();
    match parts.as_slice() {
        [b"off"] => Ok(None),
        [b"shared", name, size] if !name.is_empty() => match units::parse_size(size) {
            Some(size) if size < CACHE_BYTES_MIN => Err(invalid(format!("OCSP cache \"{}\" is too small", word.text))),
            Some(size) => Ok(Some((BString::from(*name), size))),
            None => Err(invalid(format!("invalid OCSP cache size in \"{}\"", word.text))),
        },
        _ => Err(invalid(format!("invalid OCSP cache \"{}\"", word.text))),
    }
}

/// Parses `ssl_session_cache`. As in nginx the last statement of a block counts, but `off` and `none` win over a later
/// shared cache.
fn session_cache(
    _: &mut Builder,
    statement: &Statement,
    earlier: Option<&SessionCache>,
) -> Result<SessionCache, Diagnostic> {
    let mut cache = earlier.cloned();
    for word in &statement.args {
        let invalid = || Diagnostic::emerg(format!("invalid session cache \"{}\"", word.text)).at(word.span);
        let parts: Vec<&[u8]> = word.text.split_str(":").collect();
        cache = match parts.as_slice() {
            [b"off"] => Some(SessionCache::Off),
            [b"none"] => Some(SessionCache::None),
            // Beside a shared cache `builtin` has no effect.
            [b"builtin"] if matches!(cache, Some(SessionCache::Shared(..))) => cache,
            [b"builtin"] => Some(SessionCache::Builtin(BUILTIN_SESSIONS)),
            [b"builtin", count] => match units::parse_number(count).filter(|&count| count > 0) {
                Some(_) if matches!(cache, Some(SessionCache::Shared(..))) => cache,
                Some(count) => Some(SessionCache::Builtin(count)),
                None => return Err(invalid()),
            },
            [b"shared", name, size] if !name.is_empty() => {
                let size = units::parse_size(size).ok_or_else(invalid)?;
                if size < CACHE_BYTES_MIN {
                    let message = format!("session cache \"{}\" is too small", word.text);
                    return Err(Diagnostic::emerg(message).at(word.span));
                }
                match cache {
                    Some(SessionCache::Off | SessionCache::None) => cache,
                    _ => Some(SessionCache::Shared(BString::from(*name), size)),
                }
            }
            _ => return Err(invalid()),
        };
    }
    Ok(cache.unwrap_or(SessionCache::None))
}

/// Returns the variables.
pub const fn variables<S: OverTls>() -> [Variable<S>; 30] {
    let mut all = [
        Variable::named("ssl_protocol", |subject: &S, _, out| {
            with(subject, out, |details, out| push(out, details.version()))
        }),
        Variable::named("ssl_cipher", |subject: &S, _, out| {
            with(subject, out, |details, out| push(out, details.cipher()))
        }),
        Variable::named("ssl_curve", |subject: &S, _, out| {
            with(subject, out, |details, out| details.curve().is_some_and(|curve| push(out, curve)))
        }),
        Variable::named("ssl_ciphers", |subject: &S, _, out| of_hello(subject, out, offered::ciphers)),
        Variable::named("ssl_curves", |subject: &S, _, out| of_hello(subject, out, offered::curves)),
        Variable::named("ssl_sigalgs", |subject: &S, _, out| of_hello(subject, out, offered::signature_schemes)),
        Variable::named("ssl_ja4", |subject: &S, _, out| of_hello(subject, out, offered::ja4)),
        // The TLS library does not provide it.
        Variable::named("ssl_sigalg", |subject: &S, _, out| with(subject, out, |_, _| true)),
        Variable::named("ssl_client_sigalg", |subject: &S, _, out| with(subject, out, |_, _| true)),
        Variable::named("ssl_ech_status", |subject: &S, _, out| with(subject, out, |_, _| true)),
        Variable::named("ssl_ech_outer_server_name", |subject: &S, _, out| with(subject, out, |_, _| true)),
        Variable::named("ssl_alpn_protocol", |subject: &S, _, out| {
            with(subject, out, |details, out| details.alpn().is_some_and(|name| push(out, name)))
        }),
        Variable::named("ssl_server_name", |subject: &S, _, out| {
            subject.tls().and_then(TlsStream::server_name).is_some_and(|name| push(out, name))
        }),
        Variable::named("ssl_session_reused", |subject: &S, _, out| {
            with(subject, out, |details, out| push(out, if details.is_resumed() { "r" } else { "." }))
        }),
        Variable::named("ssl_session_id", |subject: &S, _, out| with(subject, out, |_, _| true)),
        Variable::named("ssl_early_data", |subject: &S, _, out| {
            with(subject, out, |details, out| details.is_early() && push(out, "1"))
        }),
        Variable::named("ssl_client_cert", |subject: &S, _, out| {
            of_client(subject, out, |own| own.pem().trim_end().replace('\n', "\n\t"))
        }),
        Variable::named("ssl_client_raw_cert", |subject: &S, _, out| of_client(subject, out, |own| own.pem())),
        Variable::named("ssl_client_escaped_cert", |subject: &S, _, out| {
            of_client(subject, out, |own| {
                let mut escaped = Vec::new();
                escape(Class::Component, own.pem().as_bytes(), &mut escaped);
                escaped
            })
        }),
        Variable::named("ssl_client_s_dn", |subject: &S, _, out| of_client(subject, out, |own| own.subject())),
        Variable::named("ssl_client_san", |subject: &S, _, out| {
            with(subject, out, |details, out| {
                let names = details.client_certificate().and_then(|own| own.alternative_names());
                names.is_some_and(|names| push(out, names))
            })
        }),
        Variable::named("ssl_client_i_dn", |subject: &S, _, out| of_client(subject, out, |own| own.issuer())),
        Variable::named("ssl_client_s_dn_legacy", |subject: &S, _, out| {
            of_client(subject, out, |own| own.subject_legacy())
        }),
        Variable::named("ssl_client_i_dn_legacy", |subject: &S, _, out| {
            of_client(subject, out, |own| own.issuer_legacy())
        }),
        Variable::named("ssl_client_serial", |subject: &S, _, out| of_client(subject, out, |own| own.serial())),
        Variable::named("ssl_client_fingerprint", |subject: &S, _, out| {
            of_client(subject, out, |own| own.fingerprint())
        }),
        Variable::named("ssl_client_v_start", |subject: &S, _, out| of_client(subject, out, |own| own.valid_from())),
        Variable::named("ssl_client_v_end", |subject: &S, _, out| of_client(subject, out, |own| own.valid_to())),
        Variable::named("ssl_client_v_remain", |subject: &S, _, out| {
            of_client(subject, out, |own| own.days_left(gale_runtime::wall_seconds()).to_string())
        }),
        Variable::named("ssl_client_verify", |subject: &S, _, out| {
            with(subject, out, |details, out| push(out, details.verdict().to_string()))
        }),
    ];
    // As in nginx, `set` and `map` may assign other values.
    let mut index = 0;
    while index < all.len() {
        all[index].is_changeable = true;
        index += 1;
    }
    all
}

/// Appends a value of the TLS session, or nothing without TLS.
fn with<S: OverTls>(
    subject: &S,
    out: &mut Vec<u8>,
    append: impl FnOnce(&TlsDetails<'_>, &mut Vec<u8>) -> bool,
) -> bool {
    subject.tls().and_then(|stream| stream.details(|details| append(details, out))).unwrap_or(false)
}

/// Appends a value of the ClientHello.
fn of_hello<S: OverTls>(subject: &S, out: &mut Vec<u8>, text: fn(&ClientHello<'_>) -> String) -> bool {
    subject.tls().and_then(|stream| stream.client_hello(text)).is_some_and(|text| push(out, text))
}

/// Appends a value of the client's certificate, or nothing without one.
fn of_client<S: OverTls, T: AsRef<[u8]>>(
    subject: &S,
    out: &mut Vec<u8>,
    text: impl FnOnce(&Certificate<'_>) -> T,
) -> bool {
    with(subject, out, |details, out| details.client_certificate().is_some_and(|own| push(out, text(&own))))
}

fn push(out: &mut Vec<u8>, text: impl AsRef<[u8]>) -> bool {
    out.extend_from_slice(text.as_ref());
    true
}
