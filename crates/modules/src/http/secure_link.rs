//! secure_link: links with a checksum that only the server's owner can make, and with an expiry time.
//!   secure_link EXPRESSION;             http, server, location     MD5 sent by the client[,expiry time]
//!   secure_link_md5 EXPRESSION;         http, server, location     text whose MD5 must match
//!   secure_link_secret WORD;            http, server, location     for /PREFIX/MD5/LINK, MD5 of LINK and WORD
//!   $secure_link, $secure_link_expires
//! (<https://nginx.org/en/docs/http/ngx_http_secure_link_module.html>)
//!
//! A request keeps the result of its last check, so the variables also have a value in locations that check no link,
//! for example in an error page.

use std::cell::Cell;
use std::rc::Rc;

use gale_base::units;
use gale_config::{Body, Contexts, Custom, Diagnostic, Setting, Statement, Takes};
use gale_engine::configuration::Builder;
use gale_engine::module::{ConfType, Directive, Module};
use gale_http::configuration::builder::InHttp;
use gale_http::module::HttpPart;
use gale_http::request::Request;
use gale_http::variables::Variable;
use gale_http::variables::template::Template;
use md5::{Digest, Md5};
use subtle::ConstantTimeEq;

use crate::shared::append::{append, append_number};
use crate::shared::base64;

use super::variables::request_uri;

/// See the file's head.
pub static MODULE: Module = Module {
    name: "http_secure_link",
    directives: &[
        Directive {
            name: "secure_link",
            contexts: Contexts::ANYWHERE,
            takes: Takes::Exactly(1),
            body: Body::None,
            default: "",
            about: "Defines the string from which the MD5 hash of a link and, after a comma, its expiration time are \
                    taken.",
            store: &Custom(|conf: &mut Conf, builder: &mut Builder, statement| {
                let link = builder.http_mut().template(&statement.args[0])?;
                set(&mut conf.link, link, statement)
            }),
        },
        Directive {
            name: "secure_link_md5",
            contexts: Contexts::ANYWHERE,
            takes: Takes::Exactly(1),
            body: Body::None,
            default: "",
            about: "Defines the expression whose MD5 hash must equal that of the link.",
            store: &Custom(|conf: &mut Conf, builder: &mut Builder, statement| {
                let text = builder.http_mut().template(&statement.args[0])?;
                set(&mut conf.md5, text, statement)
            }),
        },
        Directive {
            name: "secure_link_secret",
            contexts: Contexts::ANYWHERE,
            takes: Takes::Exactly(1),
            body: Body::None,
            default: "",
            about: "Sets the secret word of links of the form /PREFIX/HASH/LINK.",
            store: &Custom(|conf: &mut Conf, _, statement| {
                set(&mut conf.secret, statement.args[0].text.as_slice().into(), statement)
            }),
        },
    ],
    conf: Some(ConfType {
        make: || Box::new(Conf::default()),
        merge: |conf, outer, _| {
            let conf = conf.downcast_mut::<Conf>().expect("settings have their module's type");
            conf.complete(outer.and_then(|outer| outer.downcast_ref()))
        },
        complete_main: |_, _| Ok(()),
    }),
    parts: &[&HttpPart {
        variables: &[
            Variable::named("secure_link", |request, _, out| match found(request).verdict {
                Verdict::Invalid => false,
                Verdict::Expired => append(out, b"0"),
                Verdict::Valid => append(out, b"1"),
                Verdict::Link => append(out, link_of(request).map(|(_, link)| link).unwrap_or_default()),
            }),
            Variable::named("secure_link_expires", |request, _, out| {
                found(request).expires.is_some_and(|expires| append_number(out, expires))
            }),
        ],
        ..HttpPart::EMPTY
    }],
};

/// Maximum length of an MD5 in base64, with padding.
const ENCODED_BYTES_MAX: usize = 24;

const MD5_BYTES: usize = 16;

#[derive(Default)]
struct Conf {
    link: Setting<Template>,
    md5: Setting<Template>,
    secret: Setting<Box<[u8]>>,
}

/// Result of the check of a request's link.
#[derive(Clone, Copy, Default)]
struct Found {
    verdict: Verdict,
    /// In seconds since 1970, if the link has an expiry time.
    expires: Option<u64>,
}

#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
enum Verdict {
    /// Forged, or missing.
    #[default]
    Invalid,
    Expired,
    Valid,
    /// Valid, with a secret word: the value is the link.
    Link,
}

fn set<T>(setting: &mut Setting<T>, value: T, statement: &Statement) -> Result<(), Diagnostic> {
    if setting.is_set() {
        return Err(statement.directive_error("is duplicate"));
    }
    setting.set(value, Some(statement.span));
    Ok(())
}

impl Conf {
    /// Completes the settings: a secret word cancels the inherited values of the other two directives, and they cancel
    /// an inherited secret word.
    fn complete(&mut self, outer: Option<&Conf>) -> Result<(), Diagnostic> {
        if self.secret.is_set() {
            if self.link.is_set() || self.md5.is_set() {
                let message = "\"secure_link_secret\" cannot be mixed with \"secure_link\" and \"secure_link_md5\"";
                return Err(self.secret.error(message));
            }
            return Ok(());
        }
        let Some(outer) = outer else { return Ok(()) };
        self.link.inherit(&outer.link);
        self.md5.inherit(&outer.md5);
        if !self.link.is_set() && !self.md5.is_set() {
            self.secret.inherit(&outer.secret);
        }
        Ok(())
    }
}

/// Returns the result for the location, or of the last one that checked the link.
fn found(request: &Request) -> Found {
    let note: Rc<Cell<Found>> = request.shared_note();
    let Some(conf) = request.scope().conf_of::<Conf>() else { return note.get() };
    if let Some(secret) = conf.secret.get_opt() {
        let is_valid = link_of(request).is_some_and(|(hash, link)| is_signed(hash, link, secret));
        note.set(Found { verdict: if is_valid { Verdict::Link } else { Verdict::Invalid }, expires: None });
    } else if let (Some(link), Some(md5)) = (conf.link.get_opt(), conf.md5.get_opt()) {
        let now = gale_runtime::wall_seconds();
        note.set(check(&link.evaluate(request), || md5.evaluate(request), now));
    }
    note.get()
}

/// Checks the value sent, `MD5` or `MD5,EXPIRES`.
fn check(given: &[u8], text: impl FnOnce() -> Vec<u8>, now: u64) -> Found {
    let comma = given.iter().position(|&byte| byte == b',');
    let (hash, expires) = match comma {
        None => (given, None),
        Some(comma) => match units::parse_number(&given[comma + 1..]).filter(|&expires| expires > 0) {
            None => return Found::default(),
            expires => (&given[..comma], expires),
        },
    };
    let verdict = match decoded(hash) {
        Some(hash) if bool::from(hash.ct_eq(Md5::digest(text()).as_slice())) => match expires {
            Some(expires) if expires < now => Verdict::Expired,
            _ => Verdict::Valid,
        },
        _ => Verdict::Invalid,
    };
    Found { verdict, expires }
}

fn decoded(hash: &[u8]) -> Option<[u8; MD5_BYTES]> {
    if hash.len() > ENCODED_BYTES_MAX {
        return None;
    }
    base64::decode_url(hash)?.collect::<Vec<u8>>().try_into().ok()
}

/// Returns the MD5 and the link in a target `/PREFIX/MD5/LINK`. The arguments belong to the link.
fn link_of(request: &Request) -> Option<(&[u8], &[u8])> {
    split_link(request_uri(request))
}

fn split_link(target: &[u8]) -> Option<(&[u8], &[u8])> {
    let mut parts = target.get(1..)?.splitn(3, |&byte| byte == b'/');
    let (_, hash, link) = (parts.next()?, parts.next()?, parts.next()?);
    Some((hash, link)).filter(|_| !link.is_empty())
}

fn is_signed(hash: &[u8], link: &[u8], secret: &[u8]) -> bool {
    let expected = Md5::new().chain_update(link).chain_update(secret).finalize();
    from_hex(hash).is_some_and(|hash| hash.ct_eq(expected.as_slice()).into())
}

fn from_hex(text: &[u8]) -> Option<[u8; MD5_BYTES]> {
    let mut bytes = [0; MD5_BYTES];
    if text.len() != 2 * MD5_BYTES {
        return None;
    }
    let digit = |byte: u8| (byte as char).to_digit(16);
    for (byte, pair) in bytes.iter_mut().zip(text.chunks(2)) {
        *byte = (digit(pair[0])? << 4 | digit(pair[1])?) as u8;
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The MD5 of `secret`.
    const HASH: &str = "Xr4ilOzQ4PCOq3aQ0qbuaQ";

    #[track_caller]
    fn assert_found(given: &str, verdict: Verdict, expires: Option<u64>) {
        let found = check(given.as_bytes(), || b"secret".to_vec(), 1_000);
        assert_eq!((found.verdict, found.expires), (verdict, expires), "{given}");
    }

    #[test]
    fn a_link_is_valid_until_its_time_has_passed() {
        assert_found(HASH, Verdict::Valid, None);
        assert_found(&format!("{HASH}=="), Verdict::Valid, None);
        assert_found(&format!("{HASH},1000"), Verdict::Valid, Some(1_000));
        assert_found(&format!("{HASH},999"), Verdict::Expired, Some(999));
    }

    #[test]
    fn anything_else_is_invalid() {
        for given in ["", ",", ",1", "=", "X", &HASH[1..], &format!("{HASH}AAA"), "Xr4ilOzQ4PCOq3aQ0qbuaR+/"] {
            let expires = given.strip_prefix(',').and_then(|number| number.parse().ok());
            assert_found(given, Verdict::Invalid, expires);
        }
        for expires in ["", "0", "-1", "1x", " 5", "99999999999999999999", "5,5"] {
            assert_found(&format!("{HASH},{expires}"), Verdict::Invalid, None);
        }
    }

    #[test]
    fn a_target_has_the_md5_between_a_prefix_and_the_link() {
        assert_eq!(split_link(b"/p/hash/a/b?c"), Some((&b"hash"[..], &b"a/b?c"[..])));
        assert_eq!(split_link(b"//hash/link"), Some((&b"hash"[..], &b"link"[..])));
        for none in [&b""[..], b"/", b"/p", b"/p/", b"/p/hash", b"/p/hash/", b"*"] {
            assert_eq!(split_link(none), None);
        }
        let hash = b"5EBE2294ecd0e0f08eab7690d2a6ee69";
        assert!(is_signed(hash, b"sec", b"ret") && !is_signed(hash, b"sec", b"ret "));
        assert!(!is_signed(&hash[1..], b"sec", b"ret") && !is_signed(&[b'x'; 32], b"sec", b"ret"));
    }
}
