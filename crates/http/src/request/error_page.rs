//! Response to an error status: an `error_page`, a redirect, or a built-in page.
//! (<https://nginx.org/en/docs/http/ngx_http_core_module.html#error_page>)

use gale_protocol::http1::response::reason;
use gale_protocol::request::Version;
use gale_protocol::uri::escape::{Class, escape};
use gale_runtime::Bytes;

use crate::request::Request;
use crate::request::body::Body;
use crate::request::browser::Browser;
use crate::request::configuration::settings::{ErrorPage, ErrorPageStatus};
use crate::request::phases::Flow;
use crate::request::server_field::server_field;

/// Answers a request that ended with `status`.
pub fn respond(request: &mut Request, status: u16) -> Flow {
    if closes_connection(status) {
        request.close_after_response();
    }
    request.outcome.status_override = None;
    let core = &request.scope().core;
    if !request.outcome.is_error_page {
        let page = core.error_page.get().iter().find(|page| page.status == status).cloned();
        if let Some(page) = page {
            return go_to(request, &page);
        }
    }
    Flow::Answer(plain(request, status))
}

/// True for statuses after which nginx closes the connection: the framing of the next request is unreliable, or the
/// server is in trouble.
fn closes_connection(status: u16) -> bool {
    matches!(status, 400 | 408 | 413 | 414 | 494..=497 | 500 | 501)
}

fn go_to(request: &mut Request, page: &ErrorPage) -> Flow {
    // Before the target, which may contain `$status`.
    request.outcome.status_override = match page.answer {
        ErrorPageStatus::Keep => Some(shown_status(page.status)),
        ErrorPageStatus::Replace(status) => Some(status),
        ErrorPageStatus::OfTarget => None,
    };
    let target = page.target.evaluate(request);
    request.outcome.is_error_page = !*request.scope().core.recursive_error_pages.get();
    request.response.clear_entity();
    match target.first() {
        Some(b'/') => {
            if !request.is_head() {
                request.become_get();
            }
            Flow::redirect_to(target)
        }
        Some(b'@') => Flow::Named(target[1..].into()),
        _ => {
            let wanted = request.outcome.status_override.take();
            let status = wanted.filter(|status| matches!(status, 301 | 302 | 303 | 307 | 308)).unwrap_or(302);
            request.response.location = target;
            Flow::Answer(plain(request, status))
        }
    }
}

/// Returns the built-in response: a short page that names the status.
pub fn plain(request: &mut Request, status: u16) -> Body {
    let core = &request.scope().core;
    if matches!(status, 301 | 302) && *core.msie_refresh.get() && request.browser().is_msie() {
        return refresh(request);
    }
    request.response.status = shown_status(status);
    request.response.clear_entity();
    if matches!(status, 204 | 304) || status < 200 {
        return Body::Empty;
    }
    if !has_page(status) {
        return Body::Empty;
    }
    request.response.content_type = b"text/html".as_slice().into();
    let core = &request.scope().core;
    let pads = status >= 400
        && *core.msie_padding.get()
        && request.version() >= Version::Http10
        && matches!(request.browser(), Browser::Msie { .. } | Browser::Chrome);
    let signature = server_field(request, core);
    Body::Bytes(page(status, &signature, pads))
}

/// A page that leads on, for browsers that ignore redirects with certain bodies.
/// (<https://nginx.org/en/docs/http/ngx_http_core_module.html#msie_refresh>)
fn refresh(request: &mut Request) -> Body {
    let mut page = b"<html><head><meta http-equiv=\"Refresh\" content=\"0; URL=".to_vec();
    escape(Class::Refresh, &std::mem::take(&mut request.response.location), &mut page);
    page.extend_from_slice(b"\"></head></html>\r\n");
    request.response.status = 200;
    request.response.clear_entity();
    request.response.content_type = b"text/html".as_slice().into();
    Body::Bytes(page.into())
}

/// Maps nginx's own codes to 400, which the client sees.
fn shown_status(status: u16) -> u16 {
    match status {
        494..=497 => 400,
        other => other,
    }
}

/// True for statuses that nginx has a page for. Other responses have no body.
fn has_page(status: u16) -> bool {
    matches!(status, 301..=303 | 307 | 308 | 400..=416 | 421 | 429 | 494..=497 | 500..=505 | 507)
}

/// Returns the title of a page. For two statuses it differs from the status line.
fn page_reason(status: u16) -> &'static str {
    match status {
        302 => "Found",
        401 => "Authorization Required",
        _ => reason(status),
    }
}

/// Some browsers show pages of their own for errors whose page is shorter than 512 bytes.
/// (<https://nginx.org/en/docs/http/ngx_http_core_module.html#msie_padding>)
const PADDING: &[u8] = b"<!-- padding, for browsers that put pages of their own in place of short ones -->\r\n";
const PADDING_TIMES: usize = 6;

fn page(status: u16, signature: &[u8], pads: bool) -> Bytes {
    let shown = shown_status(status);
    let heading = format!("{shown} {}", page_reason(shown));
    let explanation = match status {
        494 => "Request Header Or Cookie Too Large",
        495 => "The SSL certificate error",
        496 => "No required SSL certificate was sent",
        497 => "The plain HTTP request was sent to HTTPS port",
        _ => "",
    };
    let title = if explanation.is_empty() { heading.clone() } else { format!("{shown} {explanation}") };
    let mut text =
        format!("<html>\r\n<head><title>{title}</title></head>\r\n<body>\r\n<center><h1>{heading}</h1></center>\r\n");
    if !explanation.is_empty() {
        text.push_str(&format!("<center>{explanation}</center>\r\n"));
    }
    let mut page = text.into_bytes();
    if !signature.is_empty() {
        page.extend_from_slice(b"<hr><center>");
        for &byte in signature {
            match byte {
                b'<' => page.extend_from_slice(b"&lt;"),
                b'>' => page.extend_from_slice(b"&gt;"),
                b'&' => page.extend_from_slice(b"&amp;"),
                _ => page.push(byte),
            }
        }
        page.extend_from_slice(b"</center>\r\n");
    }
    page.extend_from_slice(b"</body>\r\n</html>\r\n");
    if pads {
        page.extend_from_slice(&PADDING.repeat(PADDING_TIMES));
    }
    page.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_says_its_status_and_escapes_the_signature() {
        let page = page(404, b"a<b", false);
        let text = std::str::from_utf8(&page).unwrap();
        assert!(text.contains("<title>404 Not Found</title>"));
        assert!(text.contains("a&lt;b"));
        assert!(!text.contains("a<b"));
    }

    #[test]
    fn nginx_s_own_codes_are_400_with_an_explanation() {
        let page = page(494, b"gale", false);
        let text = std::str::from_utf8(&page).unwrap();
        assert!(text.contains("<h1>400 Bad Request</h1>"));
        assert!(text.contains("<title>400 Request Header Or Cookie Too Large</title>"));
    }
}
