//! geoip: variables with the client's location, from an address database.
//!   geoip_country FILE [utf8];  geoip_city FILE [utf8];  geoip_org FILE [utf8];       http, stream
//!   $geoip_country_code, $geoip_country_code3, $geoip_country_name
//!   $geoip_city, $geoip_city_continent_code, $geoip_city_country_code, $geoip_city_country_code3,
//!   $geoip_city_country_name, $geoip_region, $geoip_region_name, $geoip_postal_code, $geoip_latitude,
//!   $geoip_longitude, $geoip_dma_code, $geoip_area_code
//!   $geoip_org
//! (<https://nginx.org/en/docs/http/ngx_http_geoip_module.html>)
//!
//! The databases are MaxMind DB files (`.mmdb`), not the legacy ones (`.dat`) that nginx reads. They are loaded into
//! memory before the first client: a lookup never blocks and follows at most 128 branches. A field that the record
//! lacks has no value.

use std::fmt;
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use bstr::{BString, ByteSlice};
use gale_base::log_level::Level;
use gale_base::os_error::OsErrorText;
use gale_config::{Body, Contexts, Diagnostic, OneWith, Setting, Span, Statement, Takes, slot};
use gale_engine::configuration::Builder;
use gale_engine::module::Directive;
use gale_engine::variables::Variable;
use gale_engine::variables::subject::Subject;
use gale_process::DataMapping;
use maxminddb::{LookupResult, PathElement, Reader, path};
use serde::de::{Deserialize, Deserializer, Error, Visitor};

use super::append::{append, append_number, append_text};

/// Access to a subject's databases and address.
pub trait Located: Subject {
    /// Protocol-specific settings beside the databases.
    type Own: Default + Send + Sync + 'static;

    /// The settings in force.
    fn databases(&self) -> Option<&Databases<Self::Own>>;

    /// The address to look up, or `None` if the client has none.
    fn address(&self) -> Option<IpAddr>;
}

/// The settings of the modules.
#[derive(Default)]
pub struct Databases<P: 'static> {
    country: Setting<Database>,
    city: Setting<Database>,
    org: Setting<Database>,
    /// Protocol-specific settings.
    pub own: P,
}

/// Returns the directives for a block with this context.
pub const fn directives<P: Default + Send + Sync + 'static>(context: Contexts) -> [Directive; 3] {
    const ROW: Directive = Directive {
        name: "",
        contexts: Contexts::NOWHERE,
        takes: Takes::Between(1, 2),
        body: Body::None,
        default: "",
        about: "",
        store: &gale_config::Inert,
    };
    [
        Directive {
            name: "geoip_country",
            contexts: context,
            about: "Specifies a database of countries or cities for the $geoip_country variables.",
            store: const { &OneWith { parse: country, slot: slot!(Databases<P>, country) } },
            ..ROW
        },
        Directive {
            name: "geoip_city",
            contexts: context,
            about: "Specifies a database of cities for the $geoip_city variables.",
            store: const { &OneWith { parse: city, slot: slot!(Databases<P>, city) } },
            ..ROW
        },
        Directive {
            name: "geoip_org",
            contexts: context,
            about: "Specifies a database of organizations, providers, domains or autonomous systems for $geoip_org.",
            store: const { &OneWith { parse: org, slot: slot!(Databases<P>, org) } },
            ..ROW
        },
    ]
}

/// Returns the variables.
pub const fn variables<S: Located>() -> [Variable<S>; 16] {
    [
        Variable::named("geoip_country_code", |subject: &S, _, out| {
            with(subject, |of| &of.country, |found| found.append(&path!["country", "iso_code"], out))
        }),
        Variable::named("geoip_country_code3", |subject: &S, _, out| {
            with(subject, |of| &of.country, |found| found.append_code3(out))
        }),
        Variable::named("geoip_country_name", |subject: &S, _, out| {
            with(subject, |of| &of.country, |found| found.append(&path!["country", "names", "en"], out))
        }),
        Variable::named("geoip_city", |subject: &S, _, out| {
            with(subject, |of| &of.city, |found| found.append(&path!["city", "names", "en"], out))
        }),
        Variable::named("geoip_city_continent_code", |subject: &S, _, out| {
            with(subject, |of| &of.city, |found| found.append(&path!["continent", "code"], out))
        }),
        Variable::named("geoip_city_country_code", |subject: &S, _, out| {
            with(subject, |of| &of.city, |found| found.append(&path!["country", "iso_code"], out))
        }),
        Variable::named("geoip_city_country_code3", |subject: &S, _, out| {
            with(subject, |of| &of.city, |found| found.append_code3(out))
        }),
        Variable::named("geoip_city_country_name", |subject: &S, _, out| {
            with(subject, |of| &of.city, |found| found.append(&path!["country", "names", "en"], out))
        }),
        Variable::named("geoip_region", |subject: &S, _, out| {
            with(subject, |of| &of.city, |found| found.append(&path!["subdivisions", 0, "iso_code"], out))
        }),
        Variable::named("geoip_region_name", |subject: &S, _, out| {
            with(subject, |of| &of.city, |found| found.append(&path!["subdivisions", 0, "names", "en"], out))
        }),
        Variable::named("geoip_postal_code", |subject: &S, _, out| {
            with(subject, |of| &of.city, |found| found.append(&path!["postal", "code"], out))
        }),
        Variable::named("geoip_latitude", |subject: &S, _, out| {
            with(subject, |of| &of.city, |found| found.append_degrees(&path!["location", "latitude"], out))
        }),
        Variable::named("geoip_longitude", |subject: &S, _, out| {
            with(subject, |of| &of.city, |found| found.append_degrees(&path!["location", "longitude"], out))
        }),
        Variable::named("geoip_dma_code", |subject: &S, _, out| {
            with(
                subject,
                |of| &of.city,
                |found| found.get(&path!["location", "metro_code"]).is_some_and(|Whole(code)| append_number(out, code)),
            )
        }),
        // Only legacy databases had telephone area codes.
        Variable::named("geoip_area_code", |_: &S, _, _| false),
        Variable::named("geoip_org", |subject: &S, _, out| {
            with(subject, |of| &of.org, |found| found.append_organization(out))
        }),
    ]
}

/// A database, loaded when the whole configuration is known.
#[derive(Clone)]
struct Database(Arc<Opened>);

struct Opened {
    /// Path as written in the configuration.
    file: BString,
    reader: OnceLock<Reader<DataMapping>>,
    /// `true` after the first read error was logged: only that one is.
    is_reported: AtomicBool,
}

/// A directive's kind of database: its name in nginx's messages and its types.
struct Kind {
    name: &'static str,
    /// The type's name contains one of these, in any case.
    types: &'static [&'static str],
    hint: &'static str,
}

const COUNTRY: Kind = Kind {
    name: "GeoIP",
    types: &["country", "city", "enterprise"],
    hint: "the type of a database of countries contains \"Country\", \"City\" or \"Enterprise\"",
};

const CITY: Kind = Kind {
    name: "GeoIP City",
    types: &["city", "enterprise"],
    hint: "the type of a database of cities contains \"City\" or \"Enterprise\"",
};

const ORG: Kind = Kind {
    name: "GeoIP",
    types: &["isp", "org", "asn", "domain", "enterprise"],
    hint: "the type of such a database contains \"ISP\", \"Org\", \"ASN\", \"Domain\" or \"Enterprise\"",
};

fn country(builder: &mut Builder, statement: &Statement) -> Result<Database, Diagnostic> {
    database(builder, statement, &COUNTRY)
}

fn city(builder: &mut Builder, statement: &Statement) -> Result<Database, Diagnostic> {
    database(builder, statement, &CITY)
}

fn org(builder: &mut Builder, statement: &Statement) -> Result<Database, Diagnostic> {
    database(builder, statement, &ORG)
}

/// Returns the database that a directive names, to be loaded later.
fn database(builder: &mut Builder, statement: &Statement, kind: &'static Kind) -> Result<Database, Diagnostic> {
    // All texts are UTF-8, with or without the parameter.
    if let Some(charset) = statement.args.get(1).filter(|charset| charset.text != "utf8") {
        return Err(Diagnostic::emerg(format!("invalid parameter \"{}\"", charset.text)).at(charset.span));
    }
    let (file, span) = (statement.args[0].text.clone(), statement.args[0].span);
    let opened = Opened { file, reader: OnceLock::new(), is_reported: AtomicBool::new(false) };
    let database = Database(Arc::new(opened));
    let to_fill = database.clone();
    builder.data_file(&statement.args[0].text, move |data| {
        let failed =
            |why: String| Diagnostic::emerg(format!("GeoIP_open(\"{}\") failed{why}", to_fill.0.file)).at(span);
        let data = data.map_err(|error| failed(format!(" {}", OsErrorText(&error))))?;
        to_fill.fill(data, kind, span, failed)
    });
    Ok(database)
}

impl Database {
    fn fill(
        &self,
        data: DataMapping,
        kind: &Kind,
        span: Span,
        failed: impl Fn(String) -> Diagnostic,
    ) -> Result<(), Diagnostic> {
        let file = &self.0.file;
        let is_legacy = is_legacy(file, data.as_ref());
        let reader = Reader::from_source(data).map_err(|error| {
            if is_legacy {
                let hint = "use a database in the current format (.mmdb), for example GeoLite2-Country.mmdb, \
                            GeoLite2-City.mmdb or GeoLite2-ASN.mmdb";
                return failed(": it is a legacy database (.dat)".to_owned()).hint(hint);
            }
            failed(format!(": {error}"))
        })?;
        let kind_of_file = &reader.metadata().database_type;
        let lower = kind_of_file.to_ascii_lowercase();
        if !kind.types.iter().any(|word| lower.contains(word)) {
            let message = format!("invalid {} database \"{file}\" type:{kind_of_file}", kind.name);
            return Err(Diagnostic::emerg(message).at(span).hint(kind.hint));
        }
        // Set only once, so this cannot fail.
        drop(self.0.reader.set(reader));
        Ok(())
    }
}

/// Returns `true` if the file seems to be a legacy database, by its name or by the marker before the type at its end.
fn is_legacy(file: &[u8], data: &[u8]) -> bool {
    /// Maximum distance of the marker from the end.
    const TYPE_BYTES: usize = 20;
    let end = &data[data.len().saturating_sub(TYPE_BYTES + 3)..];
    file.to_ascii_lowercase().ends_with(b".dat") || end.contains_str(b"\xff\xff\xff")
}

/// Looks a subject's address up in a database, if one is configured, and applies a function to the record.
fn with<S: Located>(
    subject: &S,
    database: fn(&Databases<S::Own>) -> &Setting<Database>,
    act: impl FnOnce(&Record<'_, S>) -> bool,
) -> bool {
    let Some(Database(opened)) = subject.databases().and_then(|of| database(of).get_opt()) else { return false };
    let (Some(reader), Some(address)) = (opened.reader.get(), subject.address()) else { return false };
    if address.is_ipv6() && reader.metadata().ip_version == 4 {
        return false;
    }
    match reader.lookup(address) {
        Ok(found) => found.has_data() && act(&Record { found, opened, subject }),
        Err(error) => opened.report(subject, &error),
    }
}

impl Opened {
    /// Logs that something cannot be read, once: clients decide how often it is looked up.
    fn report<S: Subject>(&self, subject: &S, error: &dyn fmt::Display) -> bool {
        if !self.is_reported.swap(true, Ordering::Relaxed) {
            subject.log(Level::Error, format_args!("invalid GeoIP database \"{}\": {error}", self.file));
        }
        false
    }
}

/// The database's record for an address.
struct Record<'d, S> {
    found: LookupResult<'d, DataMapping>,
    opened: &'d Opened,
    subject: &'d S,
}

impl<'d, S: Subject> Record<'d, S> {
    /// Returns a value, if the record has it with this type.
    fn get<T: Deserialize<'d>>(&self, path: &[PathElement<'_>]) -> Option<T> {
        self.found.decode_path(path).unwrap_or_else(|error| {
            self.opened.report(self.subject, &error);
            None
        })
    }

    fn append(&self, path: &[PathElement<'_>], out: &mut Vec<u8>) -> bool {
        self.get::<&str>(path).is_some_and(|text| append(out, text.as_bytes()))
    }

    fn append_degrees(&self, path: &[PathElement<'_>], out: &mut Vec<u8>) -> bool {
        self.get(path).is_some_and(|Fraction(degrees)| append_text(out, format_args!("{degrees:.4}")))
    }

    /// Appends the country's code of three letters, which is not in the record.
    fn append_code3(&self, out: &mut Vec<u8>) -> bool {
        let code = self.get::<&str>(&path!["country", "iso_code"]).and_then(code3);
        code.is_some_and(|code| append(out, code.as_bytes()))
    }

    /// Appends the owner of the address, from the most specific field that the database has.
    fn append_organization(&self, out: &mut Vec<u8>) -> bool {
        self.append(&path!["organization"], out)
            || self.append(&path!["isp"], out)
            || self.append(&path!["traits", "organization"], out)
            || self.append(&path!["traits", "isp"], out)
            || self.append(&path!["domain"], out)
            || self.append_autonomous_system(out)
    }

    /// Appends `AS64496 Example`, the form of legacy databases.
    fn append_autonomous_system(&self, out: &mut Vec<u8>) -> bool {
        let Some(Whole(number)) = self.get(&path!["autonomous_system_number"]) else { return false };
        let name = self.get::<&str>(&path!["autonomous_system_organization"]);
        append_text(out, format_args!("AS{number}"))
            && name.is_none_or(|name| append_text(out, format_args!(" {name}")))
    }
}

/// An integer, of any integer type in the database.
struct Whole(u64);

/// A number of degrees, in single or double precision.
struct Fraction(f64);

impl<'d> Deserialize<'d> for Whole {
    fn deserialize<D: Deserializer<'d>>(deserializer: D) -> Result<Whole, D::Error> {
        struct Any;

        impl Visitor<'_> for Any {
            type Value = Whole;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a whole number")
            }

            fn visit_u64<E: Error>(self, number: u64) -> Result<Whole, E> {
                Ok(Whole(number))
            }
        }

        deserializer.deserialize_any(Any)
    }
}

impl<'d> Deserialize<'d> for Fraction {
    fn deserialize<D: Deserializer<'d>>(deserializer: D) -> Result<Fraction, D::Error> {
        struct Any;

        impl Visitor<'_> for Any {
            type Value = Fraction;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a number")
            }

            fn visit_f64<E: Error>(self, number: f64) -> Result<Fraction, E> {
                Ok(Fraction(number))
            }
        }

        deserializer.deserialize_any(Any)
    }
}

/// Returns the country's code of three letters for its code of two (ISO 3166-1).
fn code3(code: &str) -> Option<&'static str> {
    COUNTRIES.split_ascii_whitespace().find_map(|row| row.strip_prefix(code)).filter(|rest| rest.len() == 3)
}

/// The codes of two and of three letters of each country (ISO 3166-1). XK is user-assigned in ISO 3166-1; databases use
/// it for Kosovo.
const COUNTRIES: &str = "\
ADAND AEARE AFAFG AGATG AIAIA ALALB AMARM AOAGO AQATA ARARG ASASM ATAUT AUAUS AWABW AXALA AZAZE BABIH BBBRB
BDBGD BEBEL BFBFA BGBGR BHBHR BIBDI BJBEN BLBLM BMBMU BNBRN BOBOL BQBES BRBRA BSBHS BTBTN BVBVT BWBWA BYBLR
BZBLZ CACAN CCCCK CDCOD CFCAF CGCOG CHCHE CICIV CKCOK CLCHL CMCMR CNCHN COCOL CRCRI CUCUB CVCPV CWCUW CXCXR
CYCYP CZCZE DEDEU DJDJI DKDNK DMDMA DODOM DZDZA ECECU EEEST EGEGY EHESH ERERI ESESP ETETH FIFIN FJFJI FKFLK
FMFSM FOFRO FRFRA GAGAB GBGBR GDGRD GEGEO GFGUF GGGGY GHGHA GIGIB GLGRL GMGMB GNGIN GPGLP GQGNQ GRGRC GSSGS
GTGTM GUGUM GWGNB GYGUY HKHKG HMHMD HNHND HRHRV HTHTI HUHUN IDIDN IEIRL ILISR IMIMN ININD IOIOT IQIRQ IRIRN
ISISL ITITA JEJEY JMJAM JOJOR JPJPN KEKEN KGKGZ KHKHM KIKIR KMCOM KNKNA KPPRK KRKOR KWKWT KYCYM KZKAZ LALAO
LBLBN LCLCA LILIE LKLKA LRLBR LSLSO LTLTU LULUX LVLVA LYLBY MAMAR MCMCO MDMDA MEMNE MFMAF MGMDG MHMHL MKMKD
MLMLI MMMMR MNMNG MOMAC MPMNP MQMTQ MRMRT MSMSR MTMLT MUMUS MVMDV MWMWI MXMEX MYMYS MZMOZ NANAM NCNCL NENER
NFNFK NGNGA NINIC NLNLD NONOR NPNPL NRNRU NUNIU NZNZL OMOMN PAPAN PEPER PFPYF PGPNG PHPHL PKPAK PLPOL PMSPM
PNPCN PRPRI PSPSE PTPRT PWPLW PYPRY QAQAT REREU ROROU RSSRB RURUS RWRWA SASAU SBSLB SCSYC SDSDN SESWE SGSGP
SHSHN SISVN SJSJM SKSVK SLSLE SMSMR SNSEN SOSOM SRSUR SSSSD STSTP SVSLV SXSXM SYSYR SZSWZ TCTCA TDTCD TFATF
TGTGO THTHA TJTJK TKTKL TLTLS TMTKM TNTUN TOTON TRTUR TTTTO TVTUV TWTWN TZTZA UAUKR UGUGA UMUMI USUSA UYURY
UZUZB VAVAT VCVCT VEVEN VGVGB VIVIR VNVNM VUVUT WFWLF WSWSM XKXKX YEYEM YTMYT ZAZAF ZMZMB ZWZWE";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_country_has_both_codes_and_none_stands_twice() {
        let rows: Vec<&str> = COUNTRIES.split_ascii_whitespace().collect();
        assert_eq!(rows.len(), 250);
        assert!(rows.iter().all(|row| row.len() == 5 && row.bytes().all(|letter| letter.is_ascii_uppercase())));
        assert!(rows.is_sorted_by(|one, other| one[..2] < other[..2]));
        let mut codes: Vec<&str> = rows.iter().map(|row| &row[2..]).collect();
        codes.sort_unstable();
        assert!(codes.is_sorted_by(|one, other| one < other));
    }

    #[test]
    fn codes_of_two_letters_have_one_of_three() {
        let codes = ["DE", "AT", "CH", "US", "ZW", "XK"].map(code3);
        assert_eq!(codes, ["DEU", "AUT", "CHE", "USA", "ZWE", "XKX"].map(Some));
        assert_eq!(["", "D", "DEU", "de", "ZZ", "DEUTS"].map(code3), [None; 6]);
    }

    #[test]
    fn legacy_databases_are_known_by_name_or_by_mark() {
        assert!(is_legacy(b"/usr/share/GeoIP/GeoIP.DAT", b""));
        assert!(is_legacy(b"GeoIP", b"tree\xff\xff\xff\x6a"));
        assert!(!is_legacy(b"GeoLite2.mmdb", b"tree\xff\xff\xff and more than 20 bytes behind"));
    }
}
