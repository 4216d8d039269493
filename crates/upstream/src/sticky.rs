//! Session affinity (`sticky`): by a cookie that Gale sets, by a route in the request, or learned from responses.
//! (<https://nginx.org/en/docs/http/ngx_http_upstream_module.html#sticky>)

use std::fmt::Write;
use std::sync::Arc;
use std::time::Duration;

use gale_base::http_date;
use gale_base::log_level::Level;
use gale_engine::variables::VariableId;
use gale_engine::variables::subject::Subject;
use gale_engine::variables::template::Template;
use gale_engine::zone::{Full, Zone};
use gale_runtime::{Moment, now, wall_seconds};
use md5::{Digest, Md5};

use super::selection::Chosen;

/// Longest name of a route; also the length of an MD5 sum in hexadecimal.
pub const ROUTE_LENGTH_MAX: usize = 32;

/// Method that finds the peer of a session.
pub enum Sticky<S> {
    /// `sticky cookie`: a cookie set by Gale names the peer.
    Cookie(StickyCookie<S>),
    /// `sticky route`: the first of these variables with a value names the peer.
    Route(Vec<VariableId>),
    /// `sticky learn`: a session identifier, learned from responses, leads to the peer.
    Learn(StickyLearn),
}

/// `sticky cookie NAME …`
pub struct StickyCookie<S> {
    /// The cookie's name.
    pub name: Box<[u8]>,
    /// `$cookie_NAME`
    pub variable: VariableId,
    /// `domain=`
    pub domain: Option<Template<S>>,
    /// `path=`
    pub path: Option<Box<[u8]>>,
    /// `expires=`
    pub expires: Option<CookieExpires>,
    /// `httponly`
    pub is_http_only: bool,
    /// `secure`
    pub is_secure: bool,
    /// `samesite=`: `strict`, `lax`, `none`, or a text that evaluates to one of these.
    pub same_site: Option<Template<S>>,
}

/// Expiry of a cookie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CookieExpires {
    /// The latest date that every client understands (`max`).
    Latest,
    /// After this time.
    After(Duration),
}

/// `sticky learn …`
pub struct StickyLearn {
    /// `lookup=`: variables with the session identifier of a request.
    pub lookup: Vec<VariableId>,
    /// `create=`: variables with the identifier of a new session in a response.
    pub create: Vec<VariableId>,
    /// `header`: learns at the response header instead of the response's end.
    pub after_header: bool,
    /// `zone=`
    pub sessions: Arc<Sessions>,
    /// `timeout=`
    pub timeout: Duration,
}

/// Sessions of a zone, each with its peer.
pub type Sessions = Zone<Session>;

/// A learned session.
pub struct Session {
    peer: Arc<str>,
    last_used: Moment,
}

/// Point at which a session may be learned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Learning {
    /// The header of a response was received.
    HeaderReceived,
    /// The response is complete, and the request was not tried elsewhere because of it.
    Finished,
}

/// Name of a peer without a route: the MD5 sum of its address.
pub(super) fn default_session_id(name: &str) -> Arc<str> {
    let mut id = String::with_capacity(ROUTE_LENGTH_MAX);
    for byte in Md5::digest(name.as_bytes()) {
        // Writing to a string cannot fail.
        let _ = write!(id, "{byte:02x}");
    }
    id.into()
}

fn first_value<S: Subject>(variables: &[VariableId], subject: &S) -> Option<Vec<u8>> {
    let mut value = Vec::new();
    variables.iter().find(|&&variable| {
        value.clear();
        subject.append_variable(variable, &mut value) && !value.is_empty()
    })?;
    Some(value)
}

impl<S: Subject> Sticky<S> {
    /// Name of the peer that the subject's session is bound to.
    pub(super) fn bound_to(&self, subject: &S) -> Option<Box<str>> {
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).ok().map(String::into_boxed_str);
        match self {
            Sticky::Cookie(cookie) => first_value(&[cookie.variable], subject).and_then(text),
            Sticky::Route(variables) => first_value(variables, subject).and_then(text),
            Sticky::Learn(learn) => learn.find(&first_value(&learn.lookup, subject)?),
        }
    }

    /// Value of the `Set-Cookie` field that binds the subject's session to this peer.
    pub(super) fn cookie(&self, subject: &S, chosen: &Chosen) -> Option<Vec<u8>> {
        match self {
            Sticky::Cookie(cookie) => Some(cookie.value(subject, chosen.session_id())),
            Sticky::Route(_) | Sticky::Learn(_) => None,
        }
    }

    pub(super) fn learn(&self, subject: &S, chosen: &Chosen, when: Learning) {
        if let Sticky::Learn(learn) = self
            && learn.after_header == (when == Learning::HeaderReceived)
        {
            learn.learn(subject, chosen.session_id());
        }
    }
}

impl<S: Subject> StickyCookie<S> {
    fn value(&self, subject: &S, peer: &str) -> Vec<u8> {
        let mut out = [&*self.name, b"=", peer.as_bytes()].concat();
        match self.expires {
            None => {}
            Some(CookieExpires::Latest) => {
                out.extend_from_slice(b"; expires=Thu, 31-Dec-37 23:55:55 GMT; max-age=315360000");
            }
            Some(CookieExpires::After(time)) => {
                out.extend_from_slice(b"; expires=");
                append_cookie_date(wall_seconds().saturating_add(time.as_secs()), &mut out);
                out.extend_from_slice(format!("; max-age={}", time.as_secs()).as_bytes());
            }
        }
        append_attribute(b"; domain=", self.domain.as_ref(), subject, &mut out, |_| true);
        if self.is_http_only {
            out.extend_from_slice(b"; httponly");
        }
        if self.is_secure {
            out.extend_from_slice(b"; secure");
        }
        append_attribute(b"; samesite=", self.same_site.as_ref(), subject, &mut out, is_same_site);
        if let Some(path) = &self.path {
            out.extend_from_slice(b"; path=");
            out.extend_from_slice(path);
        }
        out
    }
}

/// Appends an attribute unless it is empty. An invalid value becomes `strict`.
fn append_attribute<S: Subject>(
    name: &[u8],
    value: Option<&Template<S>>,
    subject: &S,
    out: &mut Vec<u8>,
    is_right: fn(&[u8]) -> bool,
) {
    let Some(value) = value.map(|value| value.text(subject)).filter(|value| !value.is_empty()) else { return };
    out.extend_from_slice(name);
    out.extend_from_slice(if is_right(&value) { &value } else { b"strict" });
}

/// `true` if it is a value of `SameSite`.
pub fn is_same_site(value: &[u8]) -> bool {
    [&b"strict"[..], b"lax", b"none"].iter().any(|known| value.eq_ignore_ascii_case(known))
}

/// Appends a date in nginx's form for cookies: with a two-digit year as far as old clients understand that.
fn append_cookie_date(seconds: u64, out: &mut Vec<u8>) {
    let date = http_date::format(seconds);
    let year = if date[12..16] > b"2037"[..] { &date[12..16] } else { &date[14..16] };
    for piece in [&date[..7], b"-", &date[8..11], b"-", year, &date[16..]] {
        out.extend_from_slice(piece);
    }
}

impl StickyLearn {
    fn find(&self, id: &[u8]) -> Option<Box<str>> {
        let id = Md5::digest(id);
        let key = self.sessions.key(&id);
        let now = now();
        self.sessions.with(&key, |table| {
            let session = table.value(table.find(&key)?);
            (now.since(session.last_used) < self.timeout).then(|| Box::from(&*session.peer))
        })
    }

    fn learn<S: Subject>(&self, subject: &S, peer: &Arc<str>) {
        let new = first_value(&self.create, subject);
        let is_new = new.is_some();
        let Some(id) = new.or_else(|| first_value(&self.lookup, subject)) else { return };
        let id = Md5::digest(id);
        let key = self.sessions.key(&id);
        let now = now();
        let learned = self.sessions.with(&key, |table| {
            // A few at a time, to keep each call short.
            for _ in 0..EXPIRED_AT_ONCE {
                let Some(oldest) = table.oldest() else { break };
                if now.since(table.value(oldest).last_used) < self.timeout {
                    break;
                }
                table.remove(oldest);
            }
            let session = || Session { peer: Arc::clone(peer), last_used: now };
            if let Some(known) = table.find(&key) {
                *table.value_mut(known) = session();
                table.bump(known);
                return Ok(());
            }
            if !is_new {
                return Ok(());
            }
            if table.insert(&key, session()).is_ok() {
                return Ok(());
            }
            if let Some(oldest) = table.oldest() {
                table.remove(oldest);
            }
            table.insert(&key, session()).map(drop)
        });
        if learned == Err(Full) {
            subject.log(Level::Alert, format_args!("could not allocate a sticky session"));
        }
    }
}

/// Expired sessions that are removed when another one is learned.
const EXPIRED_AT_ONCE: usize = 2;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_without_a_route_is_called_by_the_md5_of_its_name() {
        assert_eq!(&*default_session_id("127.0.0.1:8081"), "df2b80dc43705d28db9be6f29fe58da3");
    }

    #[test]
    fn cookies_have_dates_of_their_own() {
        let date = |seconds| {
            let mut out = Vec::new();
            append_cookie_date(seconds, &mut out);
            String::from_utf8(out).unwrap()
        };
        assert_eq!(date(784_111_777), "Sun, 06-Nov-94 08:49:37 GMT");
        assert_eq!(date(4_102_444_800), "Fri, 01-Jan-2100 00:00:00 GMT");
    }
}
