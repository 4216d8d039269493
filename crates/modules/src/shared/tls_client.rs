//! proxy_ssl_…: TLS to servers, for all proxying modules.
//!   …_ssl_protocols VERSION …;  …_ssl_ciphers LIST;  …_ssl_name NAME;  …_ssl_server_name on|off;
//!   …_ssl_verify on|off;  …_ssl_verify_depth N;  …_ssl_trusted_certificate FILE;  …_ssl_crl FILE;
//!   …_ssl_certificate FILE;  …_ssl_certificate_key FILE;  …_ssl_session_reuse on|off;
//!   …_ssl_certificate_cache …;  …_ssl_password_file FILE;  …_ssl_conf_command NAME VALUE;
//!                                                        http, server, location; in stream: stream, server
//! (<https://nginx.org/en/docs/http/ngx_http_proxy_module.html#proxy_ssl_certificate>)

use gale_config::{Diagnostic, Statement, Word};
use gale_engine::configuration::Builder;
use gale_engine::variables::subject::Subject;
use gale_engine::variables::template::Template;

use super::ssl;

/// Makes the rows. `$slot!(conf, tls.FIELD)` makes the slot of a field of `TlsClientSettings`, and
/// `$slot!(conf, tls_name)` that of a `Setting<Template<S>>`.
macro_rules! tls_client_rows {
    ([$($slot:tt)+], $subject:ty, $conf:ty, $prefix:literal, $contexts:expr) => {
        &[
            $crate::shared::tls_client::tls_client_row!($contexts, $prefix, "_ssl_protocols",
                gale_config::Takes::AtLeast(1),
                "TLSv1.2 TLSv1.3", "Enables TLS protocol versions for connections to servers.",
                &gale_config::Updated { parse: $crate::shared::ssl::versions,
                    slot: $($slot)+!($conf, tls.versions) }),
            $crate::shared::tls_client::tls_client_row!($contexts, $prefix, "_ssl_ciphers",
                gale_config::Takes::Exactly(1), "DEFAULT",
                "Specifies the enabled TLSv1.2 ciphers in the format of OpenSSL.",
                &gale_config::One { parse: gale_config::values::string,
                    slot: $($slot)+!($conf, tls.ciphers) }),
            $crate::shared::tls_client::tls_client_row!($contexts, $prefix, "_ssl_name",
                gale_config::Takes::Exactly(1), "",
                "Sets the server name that is verified in the certificate and sent by SNI; the host of the URL by \
                 default.",
                &gale_config::OneWith { parse: $crate::shared::tls_client::template::<$subject>,
                    slot: $($slot)+!($conf, tls_name) }),
            $crate::shared::tls_client::tls_client_row!($contexts, $prefix, "_ssl_server_name",
                gale_config::Takes::Flag, "off",
                "Enables or disables sending the server name through SNI.",
                &gale_config::One { parse: gale_config::values::flag,
                    slot: $($slot)+!($conf, tls.tells_name) }),
            $crate::shared::tls_client::tls_client_row!($contexts, $prefix, "_ssl_verify",
                gale_config::Takes::Flag, "off",
                "Enables or disables verification of server certificates.",
                &gale_config::One { parse: gale_config::values::flag,
                    slot: $($slot)+!($conf, tls.verifies) }),
            $crate::shared::tls_client::tls_client_row!($contexts, $prefix, "_ssl_verify_depth",
                gale_config::Takes::Exactly(1), "1",
                "Sets the verification depth in the server certificates chain.",
                &gale_config::One { parse: gale_config::values::number,
                    slot: $($slot)+!($conf, tls.verify_depth) }),
            $crate::shared::tls_client::tls_client_row!($contexts, $prefix, "_ssl_trusted_certificate",
                gale_config::Takes::Exactly(1),
                "", "Specifies a file with trusted CA certificates used to verify server certificates.",
                &gale_config::OneWith { parse: $crate::shared::tls_client::certificate,
                    slot: $($slot)+!($conf, tls.trusted_certificate) }),
            $crate::shared::tls_client::tls_client_row!($contexts, $prefix, "_ssl_crl",
                gale_config::Takes::Exactly(1), "",
                "Specifies a file with certificate revocation lists (CRL) used to verify server certificates.",
                &gale_config::OneWith { parse: $crate::shared::tls_client::certificate,
                    slot: $($slot)+!($conf, tls.crl) }),
            $crate::shared::tls_client::tls_client_row!($contexts, $prefix, "_ssl_certificate",
                gale_config::Takes::Exactly(1), "",
                "Specifies a file with the client certificate that is sent to servers that request one.",
                &gale_config::OneWith { parse: $crate::shared::tls_client::certificate,
                    slot: $($slot)+!($conf, tls.certificate) }),
            $crate::shared::tls_client::tls_client_row!($contexts, $prefix, "_ssl_certificate_key",
                gale_config::Takes::Exactly(1), "",
                "Specifies a file with the secret key of the client certificate.",
                &gale_config::OneWith { parse: $crate::shared::tls_client::certificate,
                    slot: $($slot)+!($conf, tls.key) }),
            $crate::shared::tls_client::tls_client_row!($contexts, $prefix, "_ssl_certificate_cache",
                gale_config::Takes::Between(1, 3),
                "off", "Configures the cache of certificates and keys whose file names contain variables: off, or \
                        max=N [inactive=TIME] [valid=TIME].",
                &gale_config::One { parse: $crate::shared::ssl::certificate_cache,
                    slot: $($slot)+!($conf, tls.certificate_cache) }),
            $crate::shared::tls_client::tls_client_row!($contexts, $prefix, "_ssl_password_file",
                gale_config::Takes::Exactly(1), "",
                "Specifies a file with passphrases for secret keys, one per line.",
                &gale_config::OneWith { parse: $crate::shared::tls_client::certificate,
                    slot: $($slot)+!($conf, tls.password_file) }),
            $crate::shared::tls_client::tls_client_row!($contexts, $prefix, "_ssl_conf_command",
                gale_config::Takes::Exactly(2), "",
                "Sets an OpenSSL configuration command, if it has an equivalent in Gale.",
                &gale_config::ManyWith { parse: $crate::shared::ssl::conf_command,
                    slot: $($slot)+!($conf, tls.commands) }),
            $crate::shared::tls_client::tls_client_row!($contexts, $prefix, "_ssl_session_reuse",
                gale_config::Takes::Flag, "on",
                "Enables or disables reuse of TLS sessions with servers.",
                &gale_config::One { parse: gale_config::values::flag,
                    slot: $($slot)+!($conf, tls.reuses_sessions) }),
        ]
    };
}

/// Makes one of the rows.
macro_rules! tls_client_row {
    ($contexts:expr, $prefix:literal, $name:literal, $takes:expr, $default:literal, $about:expr, $store:expr) => {
        gale_engine::module::Directive {
            name: concat!($prefix, $name),
            contexts: $contexts,
            takes: $takes,
            body: gale_config::Body::None,
            default: $default,
            about: $about,
            store: $store,
        }
    };
}

pub(crate) use {tls_client_row, tls_client_rows};

pub(crate) fn template<S: Subject>(builder: &mut Builder, statement: &Statement) -> Result<Template<S>, Diagnostic> {
    builder.variables::<S>().template(&statement.args[0])
}

/// Parses the file of certificates or of a key; an empty name means none.
pub(crate) fn certificate(builder: &mut Builder, statement: &Statement) -> Result<Word, Diagnostic> {
    match statement.args[0].text.is_empty() {
        true => Ok(statement.args[0].clone()),
        false => ssl::certificate(builder, statement),
    }
}
