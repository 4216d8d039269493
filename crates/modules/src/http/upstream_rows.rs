//! Directives of proxying modules: `proxy_read_timeout`, `fastcgi_read_timeout` and so on. The rows of each group of
//! settings stand once, here or in `cache_rows.rs`, for any prefix; a protocol names its groups.
//! (<https://nginx.org/en/docs/http/ngx_http_proxy_module.html>)

use std::sync::Arc;

use gale_config::{Body, Contexts, Diagnostic, Statement, Store, Takes, values};
use gale_engine::configuration::Builder;
use gale_engine::module::Directive;
use gale_engine::virtual_servers::TlsClientDraft;
use gale_http::configuration::builder::InHttp;
use gale_http::request::Request;
use gale_http_upstream::settings::{
    HasGroup, Ignored, ResponseBodySettings, RetryOn, ServerTlsSettings, UpstreamOf, UpstreamProtocol,
};
use gale_spool::TempPath;
use gale_upstream::Bind;

pub(crate) use crate::http::core::send_lowat;

/// Makes the protocol of a module: a type, `GROUP_ROWS` with the rows of its groups, and the content handler of the
/// module's settings. These have an `UpstreamOf` the protocol called `upstream`, and an `Option` of the servers called
/// `pass`. The function behind `pass_by` passes a request on. `always` has values that no directive of the protocol can
/// change, `handler` the functions of `PassesRequests` that are not the usual ones.
macro_rules! upstream_protocol {
    ($(#[$doc:meta])* $protocol:ident, $conf:ident, $prefix:literal, has [$($group:ident),* $(,)?],
     retry_on $conditions:expr, pass_by $pass:ident,
     $(always { $($($field:ident).+ = $value:expr),* $(,)? })? $(handler { $($function:tt)* })?) => {
        $(#[$doc])*
        pub(super) struct $protocol;

        impl $crate::http::upstream_pass::PassesRequests for $conf {
            type Protocol = $protocol;

            fn has_target(&self) -> bool {
                self.pass.is_some()
            }

            fn upstream(&self) -> &gale_http_upstream::settings::UpstreamOf<$protocol> {
                &self.upstream
            }

            fn pass<'a>(&'a self, request: &'a mut Request) -> impl Future<Output = Result<Flow, u16>> + 'a {
                $pass(request, self)
            }

            $($($function)*)?
        }

        impl gale_http_upstream::settings::UpstreamProtocol for $protocol {
            const PREFIX: &'static str = $prefix;
            const RETRY_CONDITIONS: &'static [(&'static str, u32)] = $conditions;

            fn begin() -> gale_http_upstream::settings::UpstreamSettings {
                let mut settings = gale_http_upstream::settings::UpstreamSettings::without_groups();
                $(settings.begin::<gale_http_upstream::settings::$group>();)*
                $($(settings.$($field).+ = $value;)*)?
                settings
            }
        }

        $(impl gale_http_upstream::settings::HasGroup<gale_http_upstream::settings::$group> for $protocol {})*

        /// Rows of the protocol's groups.
        const GROUP_ROWS: &[&[gale_engine::module::Directive]] =
            &[$($crate::http::upstream_rows::group_rows!($group, $protocol, $conf, $prefix)),*];
    };
}

/// Makes the table of a module: its own rows, and those of its protocol's groups.
macro_rules! upstream_table {
    ([$($own:expr),* $(,)?]) => {{
        const GROUPS: [gale_engine::module::Directive; $crate::shared::count(GROUP_ROWS)] =
            $crate::shared::join(GROUP_ROWS);
        const TABLES: &[&[gale_engine::module::Directive]] = &[&[$($own),*], &GROUPS];
        const TABLE: [gale_engine::module::Directive; $crate::shared::count(TABLES)] = $crate::shared::join(TABLES);
        TABLE
    }};
}

/// Makes the directives of one group of settings. Their names begin with `$prefix`, and they set fields of `$conf`, the
/// settings of a module whose protocol is `$protocol`.
macro_rules! group_rows {
    (ConnectSettings, $protocol:ty, $conf:ty, $prefix:literal) => {
        $crate::http::upstream_rows::rows!(ConnectSettings, $conf, $prefix, [
            "_bind", Takes::Between(1, 2), "off", "Sets the local address of connections to servers.",
                OneWith { bind } bind;
            "_bind_dynamic", Takes::Flag, "off",
                "No effect: the local address is always resolved when a connection is opened.",
                One { values::flag } bind_dynamic;
            "_allow_upstream", Takes::AtLeast(1), "",
                "Allows access to the chosen server only if all values are non-empty and not 0.",
                ManyWith { conditions } allow_upstream;
            "_socket_keepalive", Takes::Flag, "off",
                "Enables or disables TCP keepalive (SO_KEEPALIVE) on connections to servers.",
                One { values::flag } socket_keepalive;
            "_connect_timeout", Takes::Exactly(1), "60s",
                "Sets the timeout for establishing a connection with a server.",
                One { values::time_ms } connect_timeout;
        ])
    };
    (SocketBufferSettings, $protocol:ty, $conf:ty, $prefix:literal) => {
        $crate::http::upstream_rows::rows!(SocketBufferSettings, $conf, $prefix, [
            "_socket_rcvbuf", Takes::Exactly(1), "0",
                "Sets the receive buffer size (SO_RCVBUF) of connections to servers.",
                One { values::size } socket_rcvbuf;
            "_socket_sndbuf", Takes::Exactly(1), "0",
                "Sets the send buffer size (SO_SNDBUF) of connections to servers.",
                One { values::size } socket_sndbuf;
        ])
    };
    (HttpServerSettings, $protocol:ty, $conf:ty, $prefix:literal) => {
        $crate::http::upstream_rows::rows!(HttpServerSettings, $conf, $prefix, [
            "_protocol", Takes::Exactly(1), "off",
                "Sets the version of the PROXY protocol header that is sent to servers: off, on (version 1) or v2.",
                One { ProxyVersion::parse } proxy_protocol;
            "_pass_trailers", Takes::Flag, "off",
                "Enables or disables passing trailer fields of the response to the client.",
                One { values::flag } pass_trailers;
        ])
    };
    (ExchangeSettings, $protocol:ty, $conf:ty, $prefix:literal) => {
        $crate::http::upstream_rows::rows!(ExchangeSettings, $conf, $prefix, [
            "_send_timeout", Takes::Exactly(1), "60s",
                "Sets the timeout between two successive writes to the server.", One { values::time_ms } send_timeout;
            "_read_timeout", Takes::Exactly(1), "60s",
                "Sets the timeout between two successive reads from the server.", One { values::time_ms } read_timeout;
            "_buffer_size", Takes::Exactly(1), "4k",
                "Sets the size of the buffer for the response header.", One { values::size } buffer_size;
        ])
    };
    (DeadlineSettings, $protocol:ty, $conf:ty, $prefix:literal) => {
        $crate::http::upstream_rows::rows!(DeadlineSettings, $conf, $prefix, [
            "_request_timeout", Takes::Exactly(1), "0",
                "Limits the time from the first connection attempt to the end of the response; 0 disables the limit.",
                One { values::time_ms } request_timeout;
        ])
    };
    (RetrySettings, $protocol:ty, $conf:ty, $prefix:literal) => {
        $crate::http::upstream_rows::rows!(RetrySettings, $conf, $prefix, [
            "_next_upstream", Takes::AtLeast(1), "error timeout",
                "Sets the failures after which the next server of the group is tried.",
                Updated { next_upstream::<$protocol> } next_upstream;
            "_next_upstream_tries", Takes::Exactly(1), "0",
                "Limits the number of servers that are tried; 0 disables the limit.",
                One { values::number } next_upstream_tries;
            "_next_upstream_timeout", Takes::Exactly(1), "0",
                "Limits the time during which further servers are tried; 0 disables the limit.",
                One { values::time_ms } next_upstream_timeout;
        ])
    };
    (HeadSettings, $protocol:ty, $conf:ty, $prefix:literal) => {
        $crate::http::upstream_rows::rows!(HeadSettings, $conf, $prefix, [
            "_request_dynamic", Takes::Flag, "off",
                "Enables or disables creating a separate request for each server that is tried.",
                One { values::flag } request_dynamic;
            "_intercept_errors", Takes::Flag, "off",
                "Enables or disables error_page for responses of servers with codes of 300 and above.",
                One { values::flag } intercept_errors;
            "_hide_header", Takes::Exactly(1), "",
                "Hides a response header field of the server from the client.", Many { values::string } hide_header;
            "_pass_header", Takes::Exactly(1), "",
                "Passes an otherwise hidden response header field to the client.",
                Many { values::string } pass_header;
            "_ignore_headers", Takes::AtLeast(1), "",
                "Disables processing of certain response header fields of the server.",
                ManyWith { ignore_headers } ignore_headers;
        ])
    };
    (RequestBodySettings, $protocol:ty, $conf:ty, $prefix:literal) => {
        $crate::http::upstream_rows::rows!(RequestBodySettings, $conf, $prefix, [
            "_request_buffering", Takes::Flag, "on",
                "Enables or disables reading the whole request body before the request is passed to a server.",
                One { values::flag } request_buffering;
            "_pass_request_headers", Takes::Flag, "on",
                "Enables or disables passing the request header fields to the server.",
                One { values::flag } pass_request_headers;
            "_pass_request_body", Takes::Flag, "on",
                "Enables or disables passing the request body to the server.", One { values::flag } pass_request_body;
            "_ignore_client_abort", Takes::Flag, "off",
                "Enables or disables finishing a request whose client has closed the connection.",
                One { values::flag } ignore_client_abort;
        ])
    };
    (ResponseBodySettings, $protocol:ty, $conf:ty, $prefix:literal) => {
        $crate::http::upstream_rows::rows!(ResponseBodySettings, $conf, $prefix, [
            "_buffering", Takes::Flag, "on",
                "Enables or disables buffering of responses from servers.", One { values::flag } buffering;
            "_buffers", Takes::Exactly(2), "8 4k",
                "Sets the number and size of the buffers that hold a response in memory.",
                One { values::buffers } buffers;
            "_busy_buffers_size", Takes::Exactly(1), "",
                "No effect: responses being sent to the client have limits of their own. The value is checked.",
                One { values::size } busy_buffers_size;
            "_max_temp_file_size", Takes::Exactly(1), "1024m",
                "Sets the maximum size of the temporary file of a response; 0 disables temporary files.",
                One { values::size } max_temp_file_size;
            "_temp_file_write_size", Takes::Exactly(1), "",
                "No effect: writes to temporary files have a size of their own. The value is checked.",
                One { values::size } temp_file_write_size;
            "_temp_path", Takes::Between(1, 4), "",
                concat!("Sets the directory for temporary files of responses; /var/lib/gale/", $prefix, " by default."),
                OneWith { temp_path } temp_path;
            "_limit_rate", Takes::Exactly(1), "0",
                "Limits the rate of reading a response from the server in bytes per second; 0 disables the limit.",
                OneWith { size_template } limit_rate;
            "_force_ranges", Takes::Flag, "off",
                "Enables or disables byte ranges of responses without Accept-Ranges.",
                One { values::flag } force_ranges;
        ])
    };
    (ServerTlsSettings, $protocol:ty, $conf:ty, $prefix:literal) => {
        $crate::shared::tls_client::tls_client_rows!(
            [$crate::http::upstream_rows::tls_slot], gale_http::request::Request, $conf, $prefix,
            gale_config::Contexts::ANYWHERE
        )
    };
    ($group_of_cache:ident, $protocol:ty, $conf:ty, $prefix:literal) => {
        $crate::http::cache_rows::cache_rows!($group_of_cache, $conf, $prefix)
    };
}

/// Makes the rows of directives that write fields of one group. A row may have contexts of its own before its name.
macro_rules! rows {
    ($group:ident, $conf:ty, $prefix:literal,
     [$($(in $contexts:expr,)? $name:literal, $takes:expr, $default:literal, $about:expr,
        $store:ident { $parse:expr } $field:ident;)*]) => {{
        use $crate::http::upstream_rows::in_rows::*;
        &[$(
            gale_engine::module::Directive {
                $(contexts: $contexts,)?
                ..$crate::http::upstream_rows::own_row(
                    concat!($prefix, $name), $takes, $default, $about,
                    &gale_config::$store {
                        parse: $parse,
                        slot: $crate::http::upstream_rows::group_slot!($group, $conf, $field),
                    },
                )
            },
        )*]
    }};
}

/// Makes a slot of a group's field; the protocol of these settings must have the group.
macro_rules! group_slot {
    ($group:ident, $conf:ty, $($field:ident).+) => {
        gale_config::Slot {
            read: |conf: &$conf| &conf.upstream.group::<gale_http_upstream::settings::$group>().$($field).+,
            write: |conf: &mut $conf| {
                &mut conf.upstream.group_mut::<gale_http_upstream::settings::$group>().$($field).+
            },
        }
    };
}

/// Makes a slot of the TLS settings.
macro_rules! tls_slot {
    ($conf:ty, tls.$field:ident) => {
        $crate::http::upstream_rows::group_slot!(ServerTlsSettings, $conf, directives.$field)
    };
    ($conf:ty, tls_name) => {
        $crate::http::upstream_rows::group_slot!(ServerTlsSettings, $conf, name)
    };
}

/// Names that rows of groups use.
pub(crate) mod in_rows {
    pub(crate) use gale_config::{Contexts, Takes, values};
    pub(crate) use gale_upstream::ProxyVersion;

    pub(crate) use super::{bind, ignore_headers, next_upstream};
    pub(crate) use crate::http::cache_rows::*;
    pub(crate) use crate::http::core::{size_template, temp_path};
    pub(crate) use crate::shared::tls_client::template;
}

pub(crate) use {group_rows, group_slot, rows, tls_slot, upstream_protocol, upstream_table};

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

/// Gives rows of groups another text, where a protocol uses their settings in its own way.
///
/// # Panics
/// A name is not in the table.
pub(crate) const fn reworded<const N: usize>(
    mut rows: [Directive; N],
    texts: &[(&str, &'static str)],
) -> [Directive; N] {
    let mut text = 0;
    while text < texts.len() {
        let mut row = 0;
        while !is_same(rows[row].name, texts[text].0) {
            row += 1;
        }
        rows[row].about = texts[text].1;
        text += 1;
    }
    rows
}

/// Comparison for constants.
const fn is_same(one: &str, other: &str) -> bool {
    let (one, other) = (one.as_bytes(), other.as_bytes());
    let mut at = 0;
    while at < one.len() && at < other.len() && one[at] == other[at] {
        at += 1;
    }
    at == one.len() && at == other.len()
}

/// Sets the default directory of temporary files, and notes the directory if the scope uses it.
pub(crate) fn complete_temp_path<P: HasGroup<ResponseBodySettings>>(
    upstream: &mut UpstreamOf<P>,
    builder: &mut Builder,
    passes_requests: bool,
) {
    let settings = upstream.group_mut();
    if !settings.temp_path.is_set() {
        let path = builder.default_temp_path(P::PREFIX);
        settings.temp_path.set(TempPath { path: path.into(), levels: [1, 2].into_iter().collect() }, None);
    }
    if passes_requests && *settings.max_temp_file_size.get() > 0 {
        builder.http_mut().temp_paths.push(settings.temp_path.clone());
    }
}

/// Loads the files for TLS to servers, for a scope that may use it.
pub(crate) fn prepare_tls<P: HasGroup<ServerTlsSettings>>(
    upstream: &mut UpstreamOf<P>,
    builder: &mut Builder,
) -> Result<(), Diagnostic> {
    let settings = upstream.group_mut();
    let client = Arc::default();
    settings.certificate = match (settings.directives.certificate.get_opt(), settings.directives.key.get_opt()) {
        (Some(certificate), Some(key)) if settings.directives.names_certificate() => {
            let pair = (builder.http_mut().template(certificate)?, builder.http_mut().template(key)?);
            let directory = builder.configuration_directory.clone();
            builder.reach.reads_certificate(&directory, pair.0.known_path(), "ssl_certificate");
            builder.reach.reads_certificate(&directory, pair.1.known_path(), "ssl_certificate_key");
            Some(pair)
        }
        _ => None,
    };
    settings.client = Some(Arc::clone(&client));
    let draft = TlsClientDraft { settings: settings.directives.clone(), prefix: P::PREFIX, client };
    builder.http_mut().tls_clients.push(draft);
    Ok(())
}

pub(crate) fn bind(builder: &mut Builder, statement: &Statement) -> Result<Option<Bind<Request>>, Diagnostic> {
    Bind::parse(builder, statement)
}

/// Parses `…_next_upstream` of a protocol.
pub(crate) fn next_upstream<P: UpstreamProtocol>(
    builder: &mut Builder,
    statement: &Statement,
    earlier: Option<&RetryOn>,
) -> Result<RetryOn, Diagnostic> {
    retry_on(builder, statement, earlier, P::RETRY_CONDITIONS)
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

pub(crate) fn ignore_headers(builder: &mut Builder, statement: &Statement) -> Result<Ignored, Diagnostic> {
    values::bitmask(statement, Ignored::WORDS, None, &mut builder.diagnostics).map(Ignored::of)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use gale_engine::module::Module;
    use gale_engine::nginx_names;

    use super::*;
    use crate::http::{fastcgi, grpc, memcached, proxy, scgi, tunnel, uwsgi};

    /// Gale's own directives of every protocol.
    const OF_ALL: &[&str] = &["allow_upstream", "bind_dynamic"];

    /// Those of protocols with a deadline and with heads.
    const OF_MESSAGES: &[&str] = &["request_timeout", "request_dynamic"];

    /// Those of protocols with a cache.
    const OF_CACHES: &[&str] = &[
        "cache_conformance",
        "cache_disk_timeout",
        "cache_heuristic",
        "cache_no_vary_search",
        "cache_normalize_language",
        "cache_purge",
        "cache_purge_soft",
        "cache_purge_tags",
        "cache_status",
        "cache_tag_header",
    ];

    /// Directives of proxy alone, with their whole names.
    const OF_PROXY: &[&str] = &["health_check", "match"];

    /// Directives of `inert.rs`.
    const INERT: &[&str] = &["proxy_headers_hash_bucket_size", "proxy_headers_hash_max_size"];

    /// Asserts that a module has the directives of nginx's module of the same name, Gale's own ones, and no others.
    /// Those in `own` lack the prefix.
    fn assert_directives(module: &Module, prefix: &str, own: &[&[&str]]) {
        let of_nginx = nginx_names::rows().filter(|row| row.module == module.name).map(|row| row.name);
        let nginx: Vec<&str> = of_nginx.filter(|name| !INERT.contains(name)).collect();
        assert!(nginx.len() > 10, "nginx has {}", module.name);
        let own = own.iter().copied().flatten().map(|name| format!("{prefix}{name}"));
        let expected: BTreeSet<String> = nginx.into_iter().map(str::to_owned).chain(own).collect();
        let names = module.directives.iter().map(|row| row.name).filter(|name| !OF_PROXY.contains(name));
        let names: Vec<String> = names.map(str::to_owned).collect();
        assert_eq!(names.len(), expected.len(), "{} has one row for each", module.name);
        assert_eq!(names.into_iter().collect::<BTreeSet<String>>(), expected, "{}", module.name);
    }

    #[test]
    fn protocols_have_the_directives_of_nginx_and_gales_own() {
        assert_directives(&proxy::MODULE, "proxy_", &[OF_ALL, OF_MESSAGES, OF_CACHES, &["protocol", "upgrade"]]);
        assert_directives(&memcached::MODULE, "memcached_", &[OF_ALL, &["request_timeout"]]);
        assert_directives(&tunnel::MODULE, "tunnel_", &[OF_ALL]);
        assert_directives(&grpc::MODULE, "grpc_", &[OF_ALL, OF_MESSAGES]);
        // nginx has this directive of caches for proxy alone.
        let of_gateways: &[&[&str]] = &[OF_ALL, OF_MESSAGES, OF_CACHES, &["cache_convert_head"]];
        assert_directives(&fastcgi::MODULE, "fastcgi_", of_gateways);
        assert_directives(&uwsgi::MODULE, "uwsgi_", of_gateways);
        assert_directives(&scgi::MODULE, "scgi_", of_gateways);
    }

    #[test]
    fn reworded_rows_differ_in_their_text_alone() {
        let row = |module: &Module, name: &str| *module.directives.iter().find(|row| row.name == name).unwrap();
        let (usual, other) = (row(&scgi::MODULE, "scgi_buffer_size"), row(&memcached::MODULE, "memcached_buffer_size"));
        assert_eq!((usual.takes, usual.default, usual.contexts), (other.takes, other.default, other.contexts));
        assert!(usual.about.contains("response header") && other.about.contains("first line of a reply"));
        let rows = reworded([usual, other], &[("scgi_buffer_size", "of scgi")]);
        assert_eq!([rows[0].about, rows[1].about], ["of scgi", other.about]);
    }

    #[test]
    #[should_panic(expected = "out of bounds")]
    fn rewording_a_missing_row_is_a_bug() {
        reworded([own_row("a_b", Takes::Flag, "", "", &gale_config::Custom(|(): &mut (), _, _| Ok(())))], &[("a", "")]);
    }
}
