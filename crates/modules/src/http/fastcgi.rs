//! fastcgi: passes requests to FastCGI applications such as PHP-FPM.
//!   fastcgi_pass ADDRESS;                               location, if in location
//!   fastcgi_param NAME VALUE [if_not_empty];
//!   fastcgi_index NAME;  fastcgi_split_path_info REGEX;
//!   fastcgi_keep_conn on|off;  fastcgi_catch_stderr TEXT;
//!   and the directives of the protocol's groups (`upstream_rows.rs`)
//!                                                       http, server, location
//! (<https://nginx.org/en/docs/http/ngx_http_fastcgi_module.html>)

use std::any::Any;
use std::sync::Arc;

use bstr::BString;
use gale_base::log_level::Level;
use gale_config::{Contexts, Custom, Diagnostic, Many, One, OneWith, Setting, Statement, Takes, Updated, slot, values};
use gale_engine::configuration::Builder;
use gale_engine::module::{ConfType, Directive, Module};
use gale_http::configuration::builder::InHttp;
use gale_http::module::HttpPart;
use gale_http::request::Request;
use gale_http::request::phases::Flow;
use gale_http::variables::Variable;
use gale_http::variables::regex::Regex;
use gale_http_upstream::caching::Consulted;
use gale_http_upstream::fastcgi::{FastCgiReader, Stdin};
use gale_http_upstream::receiving::ResponseReader;
use gale_http_upstream::sending::{BodyFraming, RequestBody, Unframed};
use gale_http_upstream::settings::UpstreamOf;
use gale_http_upstream::{Alone, KeepHead, Passing, Wire, pass_on};
use gale_protocol::fastcgi::{self, write_begin_request};
use gale_runtime::Bytes;
use gale_upstream::{AddressPass, plain};

use crate::http::cache_rows;
use crate::http::gateway::{self, Params};
use crate::http::upstream_pass::{PassRequests, consult_cache, look_up_status, note_store, serving};
use crate::http::upstream_rows::{self, own_row as row, upstream_protocol, upstream_table};
use crate::shared::append::append;

/// See the file's head.
pub static MODULE: Module = Module {
    name: "http_fastcgi",
    directives: &upstream_table!([
        Directive {
            contexts: Contexts::LOCATION.or(Contexts::IF_IN_LOCATION),
            ..row(
                "fastcgi_pass",
                Takes::Exactly(1),
                "",
                "Sets the address of the application, or the group of servers, to which requests are passed.",
                &Custom(fastcgi_pass),
            )
        },
        row(
            "fastcgi_param",
            Takes::Between(2, 3),
            "",
            "Sets a parameter that is passed to the application; with if_not_empty only if the value is not empty.",
            &Custom(fastcgi_param),
        ),
        row(
            "fastcgi_index",
            Takes::Exactly(1),
            "",
            "Sets the file name that $fastcgi_script_name appends to a URI that ends with a slash.",
            &One { parse: values::string, slot: slot!(Conf, index) },
        ),
        row(
            "fastcgi_split_path_info",
            Takes::Exactly(1),
            "",
            "Defines a regular expression whose two captures set $fastcgi_script_name and $fastcgi_path_info.",
            &Updated { parse: split_path_info, slot: slot!(Conf, split) },
        ),
        row(
            "fastcgi_keep_conn",
            Takes::Flag,
            "off",
            "Enables or disables keeping connections to FastCGI servers open.",
            &One { parse: values::flag, slot: slot!(Conf, keep_conn) },
        ),
        row(
            "fastcgi_catch_stderr",
            Takes::Exactly(1),
            "",
            "Sets a string that makes a response invalid if the FastCGI server's error stream contains it.",
            &Many { parse: values::string, slot: slot!(Conf, catch_stderr) },
        ),
        row(
            "fastcgi_send_lowat",
            Takes::Exactly(1),
            "",
            "No effect on Linux, as in nginx.",
            &OneWith { parse: upstream_rows::send_lowat, slot: slot!(Conf, send_lowat) },
        ),
    ]),
    conf: Some(ConfType { merge, ..ConfType::of::<Conf>() }),
    parts: &[&HttpPart {
        variables: &[
            Variable::named("fastcgi_script_name", append_script_name),
            Variable::named("fastcgi_path_info", append_path_info),
        ],
        handlers: PassRequests::<Conf>::HANDLERS,
        reach: Some(note_store::<Conf>),
        ..HttpPart::EMPTY
    }],
};

upstream_protocol! {
    /// The protocol: responses of applications, which may be cached.
    FastCgiProtocol, Conf, "fastcgi",
    has [
        ConnectSettings, SocketBufferSettings, ExchangeSettings, DeadlineSettings, RetrySettings, HeadSettings,
        RequestBodySettings, ResponseBodySettings, CacheSettings, StaleSettings, StoreSettings,
    ],
    retry_on gateway::RETRY_CONDITIONS,
    pass_by pass,
}

#[derive(Default)]
struct Conf {
    upstream: UpstreamOf<FastCgiProtocol>,
    /// Not inherited: a location's content handler is its own.
    pass: Option<AddressPass<Request>>,
    params: Params,
    index: Setting<BString>,
    split: Setting<Regex>,
    keep_conn: Setting<bool>,
    catch_stderr: Setting<Vec<BString>>,
    /// Copy of `catch_stderr` for readers of responses.
    catches: Arc<[BString]>,
    send_lowat: Setting<u64>,
}

fn fastcgi_pass(conf: &mut Conf, builder: &mut Builder, statement: &Statement) -> Result<(), Diagnostic> {
    conf.pass = Some(AddressPass::read(builder, statement, conf.pass.is_some(), plain)?);
    Ok(())
}

fn fastcgi_param(conf: &mut Conf, builder: &mut Builder, statement: &Statement) -> Result<(), Diagnostic> {
    conf.params.add(builder, statement)
}

/// Parses `fastcgi_split_path_info`. As in nginx the last one of a block counts.
fn split_path_info(builder: &mut Builder, statement: &Statement, _: Option<&Regex>) -> Result<Regex, Diagnostic> {
    let word = &statement.args[0];
    let regex = builder.http_mut().regex(word, &word.text, false)?;
    if regex.groups() == 2 {
        return Ok(regex);
    }
    Err(Diagnostic::emerg(format!("pattern \"{}\" must have 2 captures", word.text)).at(word.span))
}

fn merge(conf: &mut dyn Any, parent: Option<&dyn Any>, builder: &mut Builder) -> Result<(), Diagnostic> {
    let conf: &mut Conf = conf.downcast_mut().expect("this module's settings");
    let parent: Option<&Conf> = parent.and_then(|parent| parent.downcast_ref());
    conf.params.complete(parent.map(|parent| &parent.params), builder)?;
    conf.catches = conf.catch_stderr.get_opt().cloned().unwrap_or_default().into();
    let passes_requests = conf.pass.is_some();
    cache_rows::complete(&mut conf.upstream, parent.map(|parent| &parent.upstream), builder, None)?;
    upstream_rows::complete_temp_path(&mut conf.upstream, builder, passes_requests);
    conf.upstream.complete(&gateway::hidden())
}

/// Passes a request on. The error is the status of the response.
async fn pass(request: &mut Request, conf: &Conf) -> Result<Flow, u16> {
    let pass = conf.pass.as_ref().expect("a location with this handler has the setting");
    let target = pass.resolve(request).await.map_err(look_up_status)?;
    let caching = match consult_cache(request, serving(&conf.upstream, &KeepHead)).await {
        Consulted::Answer(flow) => return Ok(flow),
        Consulted::Ask(caching) => caching,
    };
    let body = gateway::take_body(request, &conf.upstream, false).await?;
    let (is_head, keeps_connection) = (request.is_head(), *conf.keep_conn.get());
    let reader = || -> Box<dyn ResponseReader> {
        let head_max = conf.upstream.head_max();
        Box::new(FastCgiReader::new(is_head, head_max, keeps_connection, Arc::clone(&conf.catches)))
    };
    // `true` if the request is sent in one piece.
    let is_whole = body.1 == Some(0);
    let write = |request: &mut Request, passing: &mut Passing<'_>| {
        write_head(request, conf, is_whole).map(|head| passing.set_head(head))
    };
    // The block keeps the values that are only passed through out of the future.
    let mut passing = {
        let (target, caching, (body, _)) = (target, caching, body);
        let (body, framing): (_, &dyn BodyFraming) =
            if is_whole { (RequestBody::None, &Unframed) } else { (body, &Stdin) };
        Passing {
            selection: target.select(request),
            upstream: target.sticky_upstream(request),
            scheme: "fastcgi://",
            tls: None,
            write: &write,
            uri: Bytes::new(),
            wire: Wire::Alone(Alone {
                head: Bytes::new(),
                framing,
                reader: &reader,
                reuses_connections: keeps_connection,
            }),
            body,
            settings: &conf.upstream,
            time_max: None,
            rewriter: &KeepHead,
            upgrade: None,
            caching,
        }
    };
    Ok(pass_on(request, &mut passing).await)
}

/// Returns the head of the request to the application, with the end of the body if there is no body.
fn write_head(request: &Request, conf: &Conf, is_whole: bool) -> Result<Bytes, u16> {
    let mut head = Vec::with_capacity(1024);
    write_begin_request(&mut head, *conf.keep_conn.get());
    let mut params = fastcgi::Params::new(&mut head);
    let written = conf.params.write(request, &conf.upstream, &mut params);
    written.map_err(|fault| gateway::refuse(request, "fastcgi", fault))?;
    params.finish();
    if is_whole {
        head.extend_from_slice(&fastcgi::STDIN_END);
    }
    Ok(Bytes::from(head))
}

/// Splits a request's URI into the script name and the path info.
fn split<'r>(request: &'r Request, conf: Option<&Conf>) -> (&'r [u8], &'r [u8]) {
    let uri: &[u8] = &request.uri;
    let Some(regex) = conf.and_then(|conf| conf.split.get_opt()) else { return (uri, b"") };
    match regex.find(uri) {
        Ok(Some(found)) => {
            let group = |number| found.captures.text(uri, number).unwrap_or_default();
            (group(1), group(2))
        }
        Ok(None) => (uri, b""),
        Err(error) => {
            request.log(Level::Alert, format_args!("{error}"));
            (uri, b"")
        }
    }
}

fn append_script_name(request: &Request, _: &[u8], out: &mut Vec<u8>) -> bool {
    let conf = request.scope().conf_of::<Conf>();
    let (script, _) = split(request, conf);
    out.extend_from_slice(script);
    if script.ends_with(b"/")
        && let Some(index) = conf.and_then(|conf| conf.index.get_opt())
    {
        out.extend_from_slice(index);
    }
    true
}

fn append_path_info(request: &Request, _: &[u8], out: &mut Vec<u8>) -> bool {
    append(out, split(request, request.scope().conf_of::<Conf>()).1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::upstream_pass::tests::assert_small;

    #[test]
    fn a_request_that_is_passed_on_takes_one_small_allocation() {
        assert_small(|(request, conf)| pass(request, conf));
    }
}
