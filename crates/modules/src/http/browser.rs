//! browser: variables that tell modern from ancient browsers by `User-Agent`.
//!   modern_browser BROWSER VERSION;  modern_browser unlisted;     http, server, location
//!   ancient_browser TEXT ...;        ancient_browser netscape4;   http, server, location
//!   modern_browser_value TEXT;  ancient_browser_value TEXT;       http, server, location
//!   $modern_browser, $ancient_browser: the value, or empty;  $msie
//! (<https://nginx.org/en/docs/http/ngx_http_browser_module.html>)
//!
//! The browsers are those that nginx knows, most of which are gone. Use a `map` of `$http_user_agent` for others.

use std::sync::Arc;

use bstr::{BString, ByteSlice};
use gale_config::{Body, Contexts, Custom, Diagnostic, Statement, Takes};
use gale_engine::configuration::Builder;
use gale_engine::module::{ConfType, Directive, Module};
use gale_http::module::HttpPart;
use gale_http::request::Request;
use gale_http::variables::Variable;
use gale_protocol::request::KnownHeader;

use crate::shared::append::append;

/// See the file's head.
pub static MODULE: Module = Module {
    name: "http_browser",
    directives: &[
        Directive {
            name: "modern_browser",
            contexts: Contexts::ANYWHERE,
            takes: Takes::Between(1, 2),
            body: Body::None,
            default: "",
            about: "Specifies the version from which a browser is considered modern, or (unlisted) that browsers not \
                    listed are modern.",
            store: &Custom(modern_browser),
        },
        Directive {
            name: "ancient_browser",
            contexts: Contexts::ANYWHERE,
            takes: Takes::AtLeast(1),
            body: Body::None,
            default: "",
            about: "Specifies substrings of User-Agent that mark a browser as ancient; netscape4 stands for Netscape 1 \
                    to 4.",
            store: &Custom(ancient_browser),
        },
        Directive {
            name: "modern_browser_value",
            contexts: Contexts::ANYWHERE,
            takes: Takes::Exactly(1),
            body: Body::None,
            default: "1",
            about: "Sets the value of $modern_browser for modern browsers.",
            store: &Custom(|conf: &mut Conf, _, statement| {
                conf.modern_value = Some(statement.args[0].text.clone());
                Ok(())
            }),
        },
        Directive {
            name: "ancient_browser_value",
            contexts: Contexts::ANYWHERE,
            takes: Takes::Exactly(1),
            body: Body::None,
            default: "1",
            about: "Sets the value of $ancient_browser for ancient browsers.",
            store: &Custom(|conf: &mut Conf, _, statement| {
                conf.ancient_value = Some(statement.args[0].text.clone());
                Ok(())
            }),
        },
    ],
    conf: Some(ConfType {
        make: || Box::new(Conf::default()),
        merge: |conf, outer, _| {
            let conf = conf.downcast_mut::<Conf>().expect("settings have their module's type");
            if let Some(outer) = outer.and_then(|outer| outer.downcast_ref()) {
                conf.inherit(outer);
            }
            Arc::make_mut(&mut conf.modern).complete();
            Ok(())
        },
        complete_main: |_, _| Ok(()),
    }),
    parts: &[&HttpPart {
        variables: &[
            Variable::named("modern_browser", |request, _, out| {
                append(out, value(request, Age::Modern, |conf| &conf.modern_value))
            })
            .changeable(),
            Variable::named("ancient_browser", |request, _, out| {
                append(out, value(request, Age::Ancient, |conf| &conf.ancient_value))
            })
            .changeable(),
            Variable::named("msie", |request, _, out| {
                append(out, if request.browser().is_msie() { b"1" } else { b"" })
            })
            .changeable(),
        ],
        ..HttpPart::EMPTY
    }],
};

const DEFAULT_VALUE: &[u8] = b"1";

#[derive(Default)]
struct Conf {
    modern: Arc<Modern>,
    ancient: Arc<Ancient>,
    modern_value: Option<BString>,
    ancient_value: Option<BString>,
}

/// Rules for modern browsers.
#[derive(Clone, Default)]
struct Modern {
    /// Minimum versions; in the order of `KNOWN` when complete.
    browsers: Vec<(usize, Version)>,
    /// `true` if browsers without a rule count as modern.
    takes_unlisted: bool,
}

/// Rules for ancient browsers.
#[derive(Clone, Default)]
struct Ancient {
    texts: Vec<BString>,
    takes_netscape4: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Age {
    Modern,
    Ancient,
}

/// Position of a browser's name in `User-Agent`.
struct Known {
    name: &'static str,
    /// Smallest offset of the name.
    skip: usize,
    text: &'static [u8],
    /// Distance from the name's beginning to the version.
    before_version: usize,
}

/// Opera comes first, since it used to include the names of other browsers.
const KNOWN: [Known; 5] = [
    // Opera/9.01 (X11; FreeBSD 6 i386; U; en)
    // Mozilla/4.0 (compatible; MSIE 6.0; Windows NT 5.0; en) Opera 8.0
    Known { name: "opera", skip: 0, text: b"Opera", before_version: b"Opera ".len() },
    // Mozilla/4.0 (compatible; MSIE 6.0; Windows NT 5.1)
    Known { name: "msie", skip: b"Mozilla/4.0 (compatible; ".len(), text: b"MSIE ", before_version: b"MSIE ".len() },
    // Mozilla/5.0 (X11; U; Linux i686; en-US; rv:1.0.0) Gecko/20020610
    Known { name: "gecko", skip: b"Mozilla/5.0 (".len(), text: b"rv:", before_version: b"rv:".len() },
    // Mozilla/5.0 (Macintosh; U; PPC Mac OS X; en) AppleWebKit/418 (KHTML, like Gecko) Safari/417.9.3
    Known { name: "safari", skip: b"Mozilla/5.0 (".len(), text: b"Safari/", before_version: b"Safari/".len() },
    // Mozilla/5.0 (compatible; Konqueror/3.4; Linux) KHTML/3.4.2 (like Gecko)
    Known {
        name: "konqueror",
        skip: b"Mozilla/5.0 (compatible; ".len(),
        text: b"Konqueror/",
        before_version: b"Konqueror/".len(),
    },
];

const OPERA: usize = 0;

/// A version in nginx's encoding, `1.02.03` as 1,020,300: each part counts a hundredth of the one before, and a fifth
/// part is ignored.
type Version = u64;

/// Higher than any version.
const NEVER: Version = Version::MAX;

/// Parses a version. Returns it and the rest of the text.
fn read_version(text: &[u8]) -> (Version, &[u8]) {
    let end = text.iter().position(|byte| !matches!(byte, b'0'..=b'9' | b'.')).unwrap_or(text.len());
    let mut version: Version = 0;
    let mut scale: Version = 1_000_000;
    for part in text[..end].split(|&byte| byte == b'.') {
        let digits = part.iter().map(|digit| Version::from(digit - b'0'));
        let number = digits.fold(0, |number: Version, digit| number.saturating_mul(10).saturating_add(digit));
        version = version.saturating_add(number.saturating_mul(scale));
        scale /= 100;
    }
    (version.min(NEVER - 1), &text[end..])
}

fn modern_browser(conf: &mut Conf, _: &mut Builder, statement: &Statement) -> Result<(), Diagnostic> {
    let modern = Arc::make_mut(&mut conf.modern);
    let (name, version) = match statement.args.as_slice() {
        [word] if word.text == "unlisted" => {
            modern.takes_unlisted = true;
            return Ok(());
        }
        [name, version] => (name, version),
        _ => {
            let error = statement.error("invalid number of arguments in \"modern_browser\" directive");
            return Err(error.hint("the version from which the browser is modern is missing"));
        }
    };
    let Some(place) = KNOWN.iter().position(|known| name.text.eq_ignore_ascii_case(known.name.as_bytes())) else {
        let error = Diagnostic::emerg(format!("unknown browser name \"{}\"", name.text)).at(name.span);
        return Err(error.hint("it must be msie, gecko, opera, safari or konqueror"));
    };
    match read_version(&version.text) {
        (version, b"") => modern.browsers.push((place, version)),
        _ => return Err(Diagnostic::emerg(format!("invalid browser version \"{}\"", version.text)).at(version.span)),
    }
    Ok(())
}

fn ancient_browser(conf: &mut Conf, _: &mut Builder, statement: &Statement) -> Result<(), Diagnostic> {
    let ancient = Arc::make_mut(&mut conf.ancient);
    for word in &statement.args {
        match word.text == "netscape4" {
            true => ancient.takes_netscape4 = true,
            false => ancient.texts.push(word.text.clone()),
        }
    }
    Ok(())
}

impl Conf {
    fn inherit(&mut self, outer: &Conf) {
        if self.modern.browsers.is_empty() && !self.modern.takes_unlisted {
            self.modern = Arc::clone(&outer.modern);
        }
        if self.ancient.texts.is_empty() && !self.ancient.takes_netscape4 {
            self.ancient = Arc::clone(&outer.ancient);
        }
        let inherit = |own: &mut Option<BString>, outer: &Option<BString>| {
            if own.is_none() {
                own.clone_from(outer);
            }
        };
        inherit(&mut self.modern_value, &outer.modern_value);
        inherit(&mut self.ancient_value, &outer.ancient_value);
    }

    fn age_of(&self, agent: Option<&[u8]>) -> Age {
        let unlisted = if self.modern.takes_unlisted { Age::Modern } else { Age::Ancient };
        let Some(agent) = agent else { return unlisted };
        for (place, modern_from) in &self.modern.browsers {
            if let Some(version) = KNOWN[*place].version_in(agent) {
                return if version >= *modern_from { Age::Modern } else { Age::Ancient };
            }
        }
        if self.ancient.fits(agent) { Age::Ancient } else { unlisted }
    }
}

impl Modern {
    fn complete(&mut self) {
        if !self.browsers.is_empty() && self.browsers.iter().all(|(place, _)| *place != OPERA) {
            self.browsers.push((OPERA, NEVER));
        }
        self.browsers.sort_by_key(|(place, _)| *place);
    }
}

impl Ancient {
    fn fits(&self, agent: &[u8]) -> bool {
        let is_netscape4 = |agent: &[u8]| {
            agent.len() > b"Mozilla/4.72 ".len() && matches!(agent.strip_prefix(b"Mozilla/"), Some([b'1'..=b'4', ..]))
        };
        self.takes_netscape4 && is_netscape4(agent) || self.texts.iter().any(|text| agent.contains_str(text))
    }
}

impl Known {
    /// Returns the version, if the text is of this browser.
    fn version_in(&self, agent: &[u8]) -> Option<Version> {
        let found = agent.get(self.skip..)?.find(self.text)?;
        let version = agent.get(self.skip + found + self.before_version..).filter(|text| !text.is_empty())?;
        Some(read_version(version).0)
    }
}

fn value(request: &Request, age: Age, value: fn(&Conf) -> &Option<BString>) -> &[u8] {
    let Some(conf) = request.scope().conf_of::<Conf>() else { return b"" };
    if conf.age_of(request.header(KnownHeader::UserAgent)) != age {
        return b"";
    }
    value(conf).as_ref().map_or(DEFAULT_VALUE, |value| value)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn conf(modern: &[(&str, &str)], takes_unlisted: bool, ancient: &[&str], takes_netscape4: bool) -> Conf {
        let place = |name: &str| KNOWN.iter().position(|known| known.name == name).unwrap();
        let browsers = modern.iter().map(|(name, version)| (place(name), read_version(version.as_bytes()).0));
        let mut modern = Modern { browsers: browsers.collect(), takes_unlisted };
        modern.complete();
        let texts = ancient.iter().map(|text| BString::from(*text)).collect();
        Conf { modern: modern.into(), ancient: Ancient { texts, takes_netscape4 }.into(), ..Conf::default() }
    }

    #[track_caller]
    fn assert_ages(conf: &Conf, modern: &[&str], ancient: &[&str]) {
        for (agents, age) in [(modern, Age::Modern), (ancient, Age::Ancient)] {
            for agent in agents {
                assert_eq!(conf.age_of(Some(agent.as_bytes())), age, "{agent}");
            }
        }
    }

    const MSIE_5_5: &str = "Mozilla/4.0 (compatible; MSIE 5.5; Windows NT 5.0)";
    const MSIE_6: &str = "Mozilla/4.0 (compatible; MSIE 6.0; Windows NT 5.1)";
    const OPERA_8: &str = "Mozilla/4.0 (compatible; MSIE 6.0; Windows NT 5.0; en) Opera 8.0";
    const FIREFOX: &str = "Mozilla/5.0 (X11; U; FreeBSD i386; en-US; rv:1.8.0.5) Gecko/20060729 Firefox/1.5.0.5";
    const KONQUEROR: &str = "Mozilla/5.0 (compatible; Konqueror/3.4; Linux) KHTML/3.4.2 (like Gecko)";
    const LYNX: &str = "Lynx/2.8.5rel.1 libwww-FM/2.14";

    #[test]
    fn listed_browsers_are_modern_from_a_version_on() {
        let some = conf(&[("gecko", "1.8.0.5"), ("msie", "5.5")], false, &[], false);
        assert_ages(&some, &[MSIE_5_5, MSIE_6, FIREFOX], &[OPERA_8, KONQUEROR, LYNX, "", "Opera", "MSIE 9"]);
        let newer = conf(&[("gecko", "1.8.0.6"), ("opera", "8"), ("konqueror", "3.4.0")], false, &[], false);
        assert_ages(&newer, &[OPERA_8, KONQUEROR], &[FIREFOX, MSIE_6]);
        assert_eq!(some.age_of(None), Age::Ancient);
    }

    #[test]
    fn unlisted_browsers_follow_the_setting() {
        let unlisted = conf(&[], true, &["Lynx", "MSIE 5"], false);
        assert_ages(&unlisted, &[MSIE_6, FIREFOX, ""], &[MSIE_5_5, LYNX]);
        assert_eq!(unlisted.age_of(None), Age::Modern);
        let netscape = conf(&[], true, &[], true);
        assert_ages(&netscape, &[FIREFOX, "Mozilla/4.7", "Mozilla/0.9 (X11; I)"], &["Mozilla/4.72 [en] (X11)", MSIE_6]);
        assert_ages(&conf(&[], false, &[], false), &[], &[FIREFOX, ""]);
    }

    #[test]
    fn a_version_has_parts_of_two_digits() {
        for (text, version) in [
            ("", 0),
            ("9", 9_000_000),
            ("1.8.0.5", 1_080_005),
            ("1.8.0.5.99", 1_080_005),
            ("5.5;", 5_050_000),
            (".5", 50_000),
            ("99999999999999999999999999.99999999999999999999", NEVER - 1),
        ] {
            assert_eq!(read_version(text.as_bytes()).0, version, "{text}");
        }
        let numbers = conf(&[("msie", "1")], true, &[], false);
        assert_ages(&numbers, &[&format!("Mozilla/4.0 (compatible; MSIE {}", "9".repeat(1000))], &[]);
    }
}
