//! Makes the head of the client's response from a server's: hidden fields, `X-Accel-*`, redirects, error pages.

use gale_base::log_level::Level;
use gale_base::{http_date, units};
use gale_http::request::Request;
use gale_http::request::phases::Flow;
use gale_http::request::response::{FieldList, FieldText, Reason, ShortText};
use gale_protocol::http1::is_token_byte;
use gale_protocol::response::ResponseField;
use gale_protocol::uri::split_unsafe;

use crate::receiving::UpstreamHead;
use crate::rewriter::HeadRewriter;
use crate::settings::{Ignored, UpstreamSettings};

/// Fields hidden from clients by default, for all protocols.
pub const USUALLY_HIDDEN: &[&str] =
    &["X-Accel-Expires", "X-Accel-Redirect", "X-Accel-Limit-Rate", "X-Accel-Buffering", "X-Accel-Charset"];

/// `X-Accel-Charset`: the charset that a server demands for its response, for the filter `charset`.
/// (<https://nginx.org/en/docs/http/ngx_http_proxy_module.html#proxy_ignore_headers>)
pub struct AccelCharset(pub ShortText);

/// The status to answer with instead of a server's error that has an error page in the location.
pub(super) fn intercept(
    request: &mut Request,
    settings: &UpstreamSettings,
    status: u16,
    fields: &FieldList,
) -> Option<u16> {
    if status == 404 && settings.answers_not_found {
        return Some(404);
    }
    if !*settings.head.intercept_errors.get() || status < 300 || !has_error_page(request, status) {
        return None;
    }
    if status == 401 {
        for field in fields.iter().filter(|field| field.name.known() == Some(ResponseField::WwwAuthenticate)) {
            request.response.add(field.name.clone(), field.value.clone());
        }
    }
    Some(status)
}

fn first_value(fields: &FieldList, known: ResponseField) -> Option<&[u8]> {
    // Most of these fields are missing in most responses.
    let field = fields.has(known).then(|| fields.iter().find(|field| field.name.known() == Some(known)));
    field.flatten().map(|field| &*field.value)
}

/// Obeys `X-Accel-Limit-Rate`, `X-Accel-Charset` and `X-Accel-Redirect`. Returns the redirect of the last one.
pub(super) fn obey_head(request: &mut Request, settings: &UpstreamSettings, fields: &FieldList) -> Option<Flow> {
    let ignored = settings.head.ignored;
    let rate = first_value(fields, ResponseField::XAccelLimitRate);
    if let Some(rate) = rate.filter(|_| !ignored.has(Ignored::X_ACCEL_LIMIT_RATE))
        && let Some(rate) = units::parse_number(rate)
    {
        request.set_limit_rate(rate);
    }
    let charset = first_value(fields, ResponseField::XAccelCharset).filter(|_| !ignored.has(Ignored::X_ACCEL_CHARSET));
    if let Some(name) = charset.filter(|name| !name.is_empty() && name.iter().all(|&byte| is_token_byte(byte))) {
        request.notes.put(AccelCharset(name.into()));
    }
    let target = first_value(fields, ResponseField::XAccelRedirect);
    let target = target.filter(|_| !ignored.has(Ignored::X_ACCEL_REDIRECT))?;
    Some(redirect(request, fields, target))
}

/// True if the response is read ahead of the client.
pub(super) fn is_buffered(settings: &UpstreamSettings, fields: &FieldList) -> bool {
    let ignored = settings.head.ignored;
    let text = first_value(fields, ResponseField::XAccelBuffering);
    match text.filter(|_| !ignored.has(Ignored::X_ACCEL_BUFFERING)) {
        Some(text) if text.eq_ignore_ascii_case(b"no") => false,
        Some(text) if text.eq_ignore_ascii_case(b"yes") => true,
        _ => *settings.response_body.buffering.get(),
    }
}

fn has_error_page(request: &Request, status: u16) -> bool {
    request.scope().core.error_page.get().iter().any(|page| page.status == status)
}

/// `X-Accel-Redirect`: answers from the named location.
fn redirect(request: &mut Request, fields: &FieldList, target: &[u8]) -> Flow {
    request.response.clear();
    for field in fields.iter() {
        match field.name.known() {
            Some(ResponseField::ContentType) => request.outcome.content_type_override = Some((*field.value).into()),
            Some(
                ResponseField::SetCookie
                | ResponseField::ContentDisposition
                | ResponseField::CacheControl
                | ResponseField::AcceptRanges
                | ResponseField::Expires,
            ) => {
                request.response.add(field.name.clone(), field.value.clone());
            }
            _ => {}
        }
    }
    if let Some(name) = target.strip_prefix(b"@") {
        return Flow::Named(name.into());
    }
    let Some((uri, args)) = split_unsafe(target) else {
        request.log(Level::Error, format_args!("unsafe URI \"{}\" was detected", bstr::BStr::new(target)));
        return Flow::Respond(404);
    };
    let args = args.to_vec();
    if !request.is_head() {
        request.become_get();
    }
    Flow::Redirect { uri, args: Some(args) }
}

/// Sets the status and the fields of the response to the client.
pub(super) fn copy_head(
    request: &mut Request,
    settings: &UpstreamSettings,
    rewriter: &dyn HeadRewriter,
    head: &UpstreamHead,
    fields: &FieldList,
) {
    // With the status of an error page, the server's own field is passed on like any other, as in nginx.
    let tells_last_modified = matches!(request.outcome.status_override.unwrap_or(head.status), 200 | 206 | 304);
    let response = &mut request.response;
    response.status = head.status;
    response.reason = head.reason.clone().map(|phrase| Reason { status: head.status, phrase });
    response.content_length = head.length;
    response.is_from_upstream = true;
    response.omits_server = settings.head.leaves_server_field && !fields.has(ResponseField::Server);
    for field in fields.iter() {
        if settings.head.hidden.has(&field.name) {
            continue;
        }
        let add = |request: &mut Request, value| request.response.add(field.name.clone(), value);
        match field.name.known() {
            // The client's connection is another one, and its exchange frames the body.
            Some(ResponseField::ContentLength) => {}
            Some(known) if known.is_of_connection() => {}
            Some(ResponseField::ContentType) => {
                // The target of an `X-Accel-Redirect` knows its own type better.
                request.outcome.content_type_override = None;
                request.response.content_type.clear();
                request.response.content_type.extend_from_slice(&field.value);
            }
            Some(ResponseField::ETag) if request.response.etag.is_empty() => {
                request.response.etag.extend_from_slice(&field.value);
            }
            Some(ResponseField::LastModified) if tells_last_modified => match seconds_of(&field.value) {
                Some(seconds) => request.response.last_modified = Some(seconds),
                None => add(request, field.value.clone()),
            },
            Some(ResponseField::Location) => {
                match rewriter.location(request, &field.value) {
                    Some(value) => request.response.location = value,
                    // A path of the server is not made absolute.
                    None if field.value.starts_with(b"/") => add(request, field.value.clone()),
                    None => request.response.location = field.value.to_vec(),
                }
            }
            Some(ResponseField::Refresh) => {
                let value = rewrite_refresh(request, rewriter, &field.value);
                add(request, value.map_or_else(|| field.value.clone(), FieldText::from));
            }
            Some(ResponseField::SetCookie) => {
                let value = rewriter.cookie(request, &field.value);
                add(request, value.map_or_else(|| field.value.clone(), FieldText::from));
            }
            _ => add(request, field.value.clone()),
        }
    }
}

/// Rewrites the URL behind `url=` in a `Refresh`.
fn rewrite_refresh(request: &Request, rewriter: &dyn HeadRewriter, value: &[u8]) -> Option<Vec<u8>> {
    let lower = value.to_ascii_lowercase();
    let start = bstr::ByteSlice::find(&*lower, "url=")? + 4;
    let url = rewriter.location(request, &value[start..])?;
    Some([&value[..start], &url].concat())
}

/// Parses a date; `None` if formatting it would not give the same text.
fn seconds_of(text: &[u8]) -> Option<u64> {
    let seconds = http_date::parse(text)?;
    (http_date::format(seconds)[..] == *text).then_some(seconds)
}
