//! referer: checks that a request comes from a link on an allowed page.
//!   valid_referers none | blocked | server_names | NAME[/URI] | ~REGEX ...;      server, location
//!   referer_hash_max_size, referer_hash_bucket_size: see `inert.rs`
//!   $invalid_referer: "1" if the referrer is not allowed, else empty
//! (<https://nginx.org/en/docs/http/ngx_http_referer_module.html>)
//!
//! The field is easily forged, as nginx's documentation says; the check works for the many requests that are not. A
//! check costs one lookup of a host name, and a search for each regular expression; a search that fails is not a match.

use std::sync::Arc;

use bstr::{BStr, BString};
use gale_base::log_level::Level;
use gale_config::{Body, Contexts, Custom, Diagnostic, Span, Statement, Takes, Word};
use gale_engine::configuration::{Builder, ServerId};
use gale_engine::module::{ConfType, Directive, Module};
use gale_engine::server_name::{ServerName, ServerNames};
use gale_http::configuration::builder::InHttp;
use gale_http::module::HttpPart;
use gale_http::request::Request;
use gale_http::variables::Variable;
use gale_http::variables::regex::Regex;
use gale_protocol::request::KnownHeader;

/// See the file's head.
pub static MODULE: Module = Module {
    name: "http_referer",
    directives: &[Directive {
        name: "valid_referers",
        contexts: Contexts::SERVER.or(Contexts::LOCATION),
        takes: Takes::AtLeast(1),
        body: Body::None,
        default: "",
        about: "Specifies the Referer values for which $invalid_referer is empty.",
        store: &Custom(valid_referers),
    }],
    conf: Some(ConfType {
        make: || Box::new(Conf::default()),
        merge: |conf, outer, builder| {
            let conf = conf.downcast_mut::<Conf>().expect("settings have their module's type");
            conf.complete(outer.and_then(|outer| outer.downcast_ref()), builder)
        },
        complete_main: |_, _| Ok(()),
    }),
    parts: &[&HttpPart {
        variables: &[Variable::named("invalid_referer", |request, _, out| {
            let is_valid = request.scope().conf_of::<Conf>().is_none_or(|conf| conf.referers.allow(request));
            out.extend_from_slice(if is_valid { b"" } else { b"1" });
            true
        })
        .changeable()],
        ..HttpPart::EMPTY
    }],
};

/// Maximum length of a host name, as in nginx.
const HOST_BYTES_MAX: usize = 256;

/// Length of `http://i.ru`; shorter values are not URLs.
const ADDRESS_BYTES_MIN: usize = 11;

#[derive(Default)]
struct Conf {
    /// Settings of the scope itself.
    draft: Option<Draft>,
    referers: Arc<Referers>,
}

/// A `valid_referers` that is being parsed.
struct Draft {
    referers: Referers,
    /// The server for `server_names`, and the word in the configuration.
    server: Option<(ServerId, Word)>,
    has_names: bool,
    span: Span,
}

/// Allowed referrers.
#[derive(Default)]
struct Referers {
    allows_none: bool,
    allows_blocked: bool,
    names: ServerNames<Entry>,
    /// Required prefixes of the path, by an entry's index.
    paths: Vec<Option<BString>>,
    /// Matched with the host, from `server_names`.
    host_regexes: Vec<Regex>,
    /// Matched with the whole text behind the scheme.
    regexes: Vec<Regex>,
}

/// A name's index; each name has its own, so that a duplicate is detected.
#[derive(Clone, Copy, PartialEq, Debug)]
struct Entry(usize);

fn valid_referers(conf: &mut Conf, builder: &mut Builder, statement: &Statement) -> Result<(), Diagnostic> {
    let draft = conf.draft.get_or_insert_with(|| Draft {
        referers: Referers::default(),
        server: None,
        has_names: false,
        span: statement.span,
    });
    for word in &statement.args {
        match &**word.text {
            b"" => return Err(Diagnostic::emerg("invalid referer \"\"").at(word.span)),
            b"none" => draft.referers.allows_none = true,
            b"blocked" => draft.referers.allows_blocked = true,
            b"server_names" => {
                let scope = builder.http_scope();
                draft.server = builder.http_mut().server_of(scope).map(|server| (server, word.clone()));
            }
            b"~" => return Err(Diagnostic::emerg("empty regex in \"~\"").at(word.span)),
            [b'~', expression @ ..] => {
                let regex = Regex::compile(expression, true);
                draft.referers.regexes.push(regex.map_err(|error| Diagnostic::emerg(error).at(word.span))?);
            }
            text => {
                let slash = text.iter().position(|&byte| byte == b'/').unwrap_or(text.len());
                let (name, path) = text.split_at(slash);
                draft.add(name, path, word)?;
            }
        }
    }
    Ok(())
}

impl Draft {
    fn add(&mut self, name: &[u8], path: &[u8], word: &Word) -> Result<(), Diagnostic> {
        let error = |what: &str| Diagnostic::emerg(format!("{what} \"{}\"", BStr::new(name))).at(word.span);
        let parsed = ServerName::parse(name).map_err(|_| error("invalid hostname or wildcard"))?;
        self.has_names = true;
        let entry = Entry(self.referers.paths.len());
        self.referers.paths.push(Some(BString::from(path)).filter(|path| !path.is_empty()));
        self.referers.names.insert(parsed, entry).map_err(|_| error("conflicting parameter"))
    }

    /// Adds the names of the server, which are all known now. A server without names has the empty name, as in nginx.
    fn add_server_names(&mut self, builder: &mut Builder) -> Result<(), Diagnostic> {
        let Some((server, word)) = self.server.take() else { return Ok(()) };
        let mut is_unnamed = true;
        for (name, parsed) in builder.http_mut().names_of(server) {
            is_unnamed = false;
            match parsed {
                ServerName::Regex(regex) => self.referers.host_regexes.push(regex.clone()),
                _ => self.add(&name.text, b"", &word)?,
            }
        }
        if is_unnamed { self.add(b"", b"", &word) } else { Ok(()) }
    }
}

impl Conf {
    fn complete(&mut self, outer: Option<&Conf>, builder: &mut Builder) -> Result<(), Diagnostic> {
        let Some(mut draft) = self.draft.take() else {
            self.referers = outer.map(|outer| Arc::clone(&outer.referers)).unwrap_or_default();
            return Ok(());
        };
        draft.add_server_names(builder)?;
        let mut referers = draft.referers;
        if (referers.allows_none || referers.allows_blocked) && !draft.has_names {
            let message = "the \"none\" or \"blocked\" referers are specified in the \"valid_referers\" directive \
                           without any valid referer";
            let hint = "a regular expression alone is not enough: add a name, for example server_names";
            return Err(Diagnostic::emerg(message).at(draft.span).hint(hint));
        }
        // As in nginx, expressions are inherited if the scope has none of its own.
        if let Some(outer) = outer {
            let inherit = |own: &mut Vec<Regex>, outer: &[Regex]| {
                if own.is_empty() {
                    own.extend_from_slice(outer);
                }
            };
            inherit(&mut referers.regexes, &outer.referers.regexes);
            inherit(&mut referers.host_regexes, &outer.referers.host_regexes);
        }
        self.referers = Arc::new(referers);
        Ok(())
    }
}

impl Referers {
    fn is_unused(&self) -> bool {
        self.names.is_empty() && self.host_regexes.is_empty() && self.regexes.is_empty()
    }

    fn allow(&self, request: &Request) -> bool {
        if self.is_unused() {
            return true;
        }
        match request.header(KnownHeader::Referer) {
            None => self.allows_none,
            Some(referer) => self.allow_value(referer).unwrap_or_else(|error| {
                request.log(Level::Alert, format_args!("{error}"));
                false
            }),
        }
    }

    /// Returns `true` if this value is allowed. The error is PCRE2's.
    fn allow_value(&self, referer: &[u8]) -> Result<bool, String> {
        let Some(address) = without_scheme(referer) else { return Ok(self.allows_blocked) };
        let end = address.iter().position(|byte| matches!(byte, b'/' | b':')).unwrap_or(address.len());
        if end > HOST_BYTES_MAX {
            return Ok(false);
        }
        let host = address[..end].to_ascii_lowercase();
        if let Some(Entry(index)) = self.names.find_name(&host) {
            let Some(wanted) = &self.paths[index] else { return Ok(true) };
            // A port may stand before the path.
            let path = address.iter().position(|&byte| byte == b'/').map_or(&b""[..], |slash| &address[slash..]);
            return Ok(path.starts_with(wanted));
        }
        for regex in &self.host_regexes {
            if regex.is_match(&host)? {
                return Ok(true);
            }
        }
        for regex in &self.regexes {
            if regex.is_match(address)? {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

/// Returns the text behind `http://` or `https://`, or `None` if a firewall or a proxy has deleted or masked the value.
fn without_scheme(referer: &[u8]) -> Option<&[u8]> {
    let is_long_enough = referer.len() >= ADDRESS_BYTES_MIN;
    let schemes: [&[u8]; 2] = [b"http://", b"https://"];
    schemes.into_iter().filter(|_| is_long_enough).find_map(|scheme| {
        let (start, rest) = referer.split_at_checked(scheme.len())?;
        start.eq_ignore_ascii_case(scheme).then_some(rest)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn referers(names: &[(&str, &str)], regexes: &[&str]) -> Referers {
        let mut referers = Referers::default();
        for (index, (name, path)) in names.iter().enumerate() {
            referers.names.insert(ServerName::parse(name.as_bytes()).unwrap(), Entry(index)).unwrap();
            referers.paths.push(Some(BString::from(*path)).filter(|path| !path.is_empty()));
        }
        let regexes = regexes.iter().map(|text| Regex::compile(text.as_bytes(), true).unwrap());
        referers.regexes.extend(regexes);
        referers
    }

    #[test]
    fn hosts_are_compared_without_case_and_paths_with_it() {
        let referers = referers(&[("www.example.org", ""), ("*.example.com", "/Shop")], &[]);
        for (value, is_allowed) in [
            ("http://www.example.org", true),
            ("HTTPS://WWW.Example.ORG:8443/any", true),
            ("http://www.example.org.evil.net/", false),
            ("http://evil.net/www.example.org", false),
            ("http://a.example.com/Shop/cart", true),
            ("http://a.example.com:80/Shop", true),
            ("http://a.example.com/shop", false),
            ("http://a.example.com", false),
            ("http://example.com/Shop", false),
            ("www.example.org/path", false),
            ("ftp://www.example.org", false),
            ("http://", false),
            ("", false),
        ] {
            assert_eq!(referers.allow_value(value.as_bytes()), Ok(is_allowed), "{value}");
        }
    }

    #[test]
    fn regular_expressions_see_all_behind_the_scheme() {
        let referers = referers(&[], &["^example\\.org/blog"]);
        assert_eq!(referers.allow_value(b"https://Example.org/blog/1"), Ok(true));
        assert_eq!(referers.allow_value(b"https://example.org/"), Ok(false));
        let longest = [&b"http://"[..], &[b'a'; HOST_BYTES_MAX]].concat();
        let any = self::referers(&[], &[".*"]);
        assert_eq!(any.allow_value(&longest), Ok(true));
        assert_eq!(any.allow_value(&[&longest[..], b"a"].concat()), Ok(false));
    }

    #[test]
    fn malformed_referer_is_blocked() {
        let mut referers = referers(&[("example.org", "")], &[]);
        for value in [&b"XXXX:++++++++++"[..], b"", b"http://a.b", b"\xff\xfe"] {
            referers.allows_blocked = false;
            assert_eq!(referers.allow_value(value), Ok(false));
            referers.allows_blocked = true;
            assert_eq!(referers.allow_value(value), Ok(true));
        }
    }
}
