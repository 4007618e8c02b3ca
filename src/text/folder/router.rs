//! Router of sentence-transformers: several pipelines of modules (routes). The task of a text selects the route.

use super::{
    Folder,
    json::{Json, check_known},
    modules::{Entry, entry},
};
use crate::{names::nearest, runtime::weights::ModelFiles, text::TextError};

/// Class of the module.
const ROUTER: &str = "Router";
/// Names of the module's file. Older versions use the second name.
const FILES: [&str; 2] = ["router_config.json", "config.json"];
/// The kind of inputs that gemmule reads. A Router may also have rules and routes for other kinds.
const TEXT: &str = "text";
const OTHER_INPUTS: [&str; 4] = ["audio", "image", "message", "video"];

/// The routes of a folder, and the one that is loaded.
#[derive(Clone, Debug)]
pub(super) struct Route {
    pub(super) name: String,
    /// Names of all routes.
    routes: Vec<String>,
    rules: Vec<Rule>,
}

/// An entry of `route_mappings` that can apply to texts.
#[derive(Clone, Debug)]
struct Rule {
    /// `None` for any task.
    task: Option<String>,
    /// Whether the rule applies only to texts. Otherwise it applies to all kinds of inputs.
    of_texts: bool,
    route: String,
}

impl Route {
    /// Returns the route for a task; see [`resolved`].
    pub(super) fn of_task(&self, task: &str) -> Option<&str> {
        resolved(&self.routes, &self.rules, Some(task))
    }

    /// Returns a list of tasks: one for each route that a task can select.
    pub(super) fn tasks(&self) -> Vec<&str> {
        let named = self.rules.iter().filter_map(|rule| rule.task.as_deref());
        let routes = self.routes.iter().map(String::as_str);
        let tasks = routes.chain(named).filter(|t| !OTHER_INPUTS.contains(t));
        let mut found: Vec<&str> = Vec::new();
        for task in tasks {
            let route = self.of_task(task);
            if route.is_some() && !found.iter().any(|other| self.of_task(other) == route) {
                found.push(task);
            }
        }
        found
    }
}

impl Folder {
    /// Returns the name of the loaded route of a Router; `None` without a Router.
    pub fn route(&self) -> Option<&str> {
        self.route.as_ref().map(|route| route.name.as_str())
    }

    /// Returns the route of a Router for a task such as `query` or `document`; `None` without a Router, or if no route is for this task.
    pub fn route_for(&self, task: &str) -> Option<&str> {
        self.route.as_ref()?.of_task(task)
    }

    /// Returns whether the loaded route of a Router is for a task.
    pub fn is_route_for(&self, task: &str) -> bool {
        self.route().is_some() && self.route() == self.route_for(task)
    }

    /// Returns a list of tasks: one for each route other than the loaded one. [`open_for`](Self::open_for) reads the route of such a task.
    /// The list is empty without a Router.
    pub fn other_tasks(&self) -> Vec<&str> {
        let Some(route) = &self.route else {
            return Vec::new();
        };
        let is_other = |task: &&str| route.of_task(task) != Some(&route.name);
        route.tasks().into_iter().filter(is_other).collect()
    }
}

/// Returns the route for a task, like `Router._resolve_route_name` of sentence-transformers. A rule for the task takes precedence over a
/// rule without a task. Among rules with the same task, a rule for texts takes precedence over a rule for all inputs. If no rule applies,
/// returns the route with the name of the task, or else the route `text`.
fn resolved<'r>(routes: &'r [String], rules: &'r [Rule], task: Option<&str>) -> Option<&'r str> {
    let places = [(task, true), (task, false), (None, true), (None, false)];
    let rule = places.into_iter().find_map(|(task, of_texts)| {
        let applies = |rule: &&Rule| rule.task.as_deref() == task && rule.of_texts == of_texts;
        rules.iter().find(applies)
    });
    let named = || task.into_iter().chain([TEXT]);
    let direct = || named().find_map(|name| routes.iter().find(|route| *route == name));
    let found = rule.map(|rule| &rule.route).or_else(direct);
    found.map(String::as_str)
}

/// Replaces a Router by the modules of a route: the one for `task`, or the default route.
///
/// # Errors
/// Returns an error if the Router's file is missing or malformed, or if there is no route for the task.
pub(super) fn routed(
    root: &ModelFiles,
    mut listed: Vec<Entry>,
    task: Option<&str>,
) -> Result<(Vec<Entry>, Option<Route>), TextError> {
    let is_router = |entry: &Entry| entry.class == ROUTER;
    let Some(at) = listed.iter().position(is_router) else {
        return Ok((listed, None));
    };
    let inner = |name: &str| match listed[at].folder.as_str() {
        "" => name.to_owned(),
        folder => format!("{folder}/{name}"),
    };
    let json = match Json::optional(root, &inner(FILES[0]))? {
        Some(json) => json,
        None => Json::read(root, &inner(FILES[1]))?,
    };
    json.check_keys(&["types", "structure", "parameters"])?;
    let structure = json.object("structure")?;
    let parameters = Json {
        file: json.file.clone(),
        value: json.object("parameters")?.into(),
    };
    let known = ["default_route", "allow_empty_key", "route_mappings"];
    check_known(&json.object("parameters")?, &known)
        .map_err(|problem| json.problem(format!("`parameters`: {problem}")))?;
    let rules = rules(&parameters)?;
    if let Some(rule) = rules
        .iter()
        .find(|rule| !structure.contains_key(&rule.route))
    {
        let problem = format!(
            "`route_mappings` names the route `{}`, which is not in `structure`",
            rule.route
        );
        return Err(json.problem(problem));
    }
    let routes: Vec<String> = structure.keys().cloned().collect();
    let name = match (task, resolved(&routes, &rules, task)) {
        (_, Some(name)) => name.to_owned(),
        (Some(task), None) => {
            let near = nearest(task, routes.iter().map(String::as_str));
            return Err(TextError::NoRoute {
                folder: root.path().to_owned(),
                task: task.to_owned(),
                near: near.map(str::to_owned),
                routes: routes.join(", "),
            });
        }
        (None, None) => default_route(&parameters, &routes)?,
    };
    let types = json.object("types")?;
    let wrong = || {
        json.problem(format!(
            "the route `{name}` is not a list of modules in `types`"
        ))
    };
    let mut entries = Vec::new();
    for folder in structure[&name].as_array().ok_or_else(wrong)? {
        let folder = folder.as_str().ok_or_else(wrong)?;
        let class = types.get(folder).and_then(|class| class.as_str());
        let found = entry(&json, folder, class.ok_or_else(wrong)?, false)?;
        entries.push(Entry {
            folder: inner(&found.folder),
            ..found
        });
    }
    listed.splice(at..=at, entries);
    if listed.iter().any(is_router) {
        let file = root.name("modules.json");
        let problem = "there are several modules `Router`; expected one".to_owned();
        return Err(TextError::Folder { file, problem });
    }
    let route = Route {
        name,
        routes,
        rules,
    };
    Ok((listed, Some(route)))
}

/// Returns the route of texts without a task.
fn default_route(parameters: &Json, routes: &[String]) -> Result<String, TextError> {
    let name = match parameters.text("default_route")? {
        Some(name) => Some(name.to_owned()),
        // Without a `default_route`, sentence-transformers uses the first route of the file. The order of the file is not kept here, so the
        // only unambiguous case is a single route.
        None if parameters.flag("allow_empty_key", true)? && routes.len() == 1 => {
            routes.first().cloned()
        }
        None => None,
    };
    let name = name.filter(|name| routes.contains(name));
    name.ok_or_else(|| parameters.wrong("default_route", "the name of a route"))
}

/// Returns the rules that can apply to texts. Their keys are tuples of Python, such as `('query', 'text')` and `(None, 'image')`.
fn rules(parameters: &Json) -> Result<Vec<Rule>, TextError> {
    let key = "route_mappings";
    let expected =
        "routes by the task and the kind of input, such as {\"('query', 'text')\": \"query\"}";
    let wrong = || parameters.wrong(key, expected);
    let mut rules = Vec::new();
    for (tuple, route) in parameters.object(key)? {
        let inner = tuple
            .strip_prefix('(')
            .and_then(|rest| rest.strip_suffix(')'));
        let (task, input) = inner
            .and_then(|pair| pair.split_once(", "))
            .ok_or_else(wrong)?;
        let route = route.as_str().ok_or_else(wrong)?.to_owned();
        let task = quoted(task).ok_or_else(wrong)?.map(str::to_owned);
        // A tuple means inputs that combine several kinds, such as a text and an image. The rule cannot apply to plain texts.
        let input = match input.starts_with('(') {
            true => continue,
            false => quoted(input).ok_or_else(wrong)?,
        };
        if input.is_none_or(|input| input == TEXT) {
            rules.push(Rule {
                task,
                of_texts: input.is_some(),
                route,
            });
        }
    }
    Ok(rules)
}

/// Parses a Python string in quotes, or Python's `None`, which gives `Some(None)`. Returns `None` for anything else.
fn quoted(text: &str) -> Option<Option<&str>> {
    if text == "None" {
        return Some(None);
    }
    let in_quotes = |quote: char| text.strip_prefix(quote)?.strip_suffix(quote);
    in_quotes('\'').or_else(|| in_quotes('"')).map(Some)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tasks_choose_routes_like_in_sentence_transformers() {
        let rule = |task: Option<&str>, of_texts, route: &str| Rule {
            task: task.map(str::to_owned),
            of_texts,
            route: route.to_owned(),
        };
        let routes = ["a", "b", "image", "query"].map(str::to_owned).to_vec();
        let rules = vec![
            rule(Some("query"), false, "a"),
            rule(Some("query"), true, "b"),
        ];
        let chosen = |rules: &[Rule], task| resolved(&routes, rules, task).map(str::to_owned);
        assert_eq!(chosen(&rules, Some("query")).as_deref(), Some("b"));
        assert_eq!(chosen(&rules[..1], Some("query")).as_deref(), Some("a"));
        assert_eq!(chosen(&[], Some("query")).as_deref(), Some("query"));
        assert_eq!(chosen(&rules, Some("other")), None);
        assert_eq!(chosen(&rules, None), None);
        let any = vec![rule(None, true, "a")];
        assert_eq!(chosen(&any, Some("query")).as_deref(), Some("a"));
        let route = Route {
            name: "a".to_owned(),
            routes: routes.clone(),
            rules,
        };
        assert_eq!(route.tasks(), ["a", "b"]);
        assert_eq!(quoted("'a'"), Some(Some("a")));
        assert_eq!(quoted("None"), Some(None));
        assert_eq!(quoted("'a\""), None);
        assert_eq!(quoted("'"), None);
    }
}
